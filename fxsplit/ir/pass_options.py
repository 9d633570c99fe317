"""Options of passes as text: `{repeats=3,at=modules=2,names=["a,b",c]}`, read by the types of the options.

A value is bare, or in double quotes if it has commas, brackets, quotes or spaces at its ends, or a list in square
brackets. A value in quotes is always a text.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fxsplit.errors import ChainError
from fxsplit.system.figures import show

_KEY = re.compile(r"\s*(\w+)\s*=\s*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_BARE = re.compile(r'[^,{}\[\]"]+')
_SPACE = re.compile(r"\s*")
_OTHERS = re.compile(r"true|false|none|[+-]?(?:inf|infinity|nan|[\d.].*)", re.IGNORECASE)
"""Bare values that may be read as a number, a flag or none, and not as a text."""

DEEPEST = 20
"""How deep lists may lie inside each other."""

Read = Callable[[Any], Any]
"""From the type of an option: its value in that type. Raises ChainError for a value of another type."""


@cache
def find_hints(cls: type) -> dict[str, Any]:
    """Return the types of the options of a pass, by name.

    Empty if Python cannot find them, as for a class in a function.
    """
    try:
        return get_type_hints(cls)
    except Exception:
        return {}


def write_option(value: Any, hint: Any = None) -> str:
    """Return the value of an option as text. An option of type `hint` that reads the text gets the same value."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        inner = _find_item(hint)
        return f"[{','.join(write_option(item, inner) for item in value)}]"
    text = str(value)
    bare = _BARE.fullmatch(text) and text == text.strip() and "\n" not in text
    # An option of type str takes every text. If another type is possible too, quotes mark a text.
    if bare and (hint is str or not _OTHERS.fullmatch(text)):
        return text
    return json.dumps(text)


def read_options(text: str, at: int, name: str) -> tuple[dict[str, Read], int]:
    """Return the options of pass `name` in the braces at position `at` of a chain, and the position after them.

    Each option is a function that takes the type of the option and returns its value. Raises ChainError for a malformed
    or repeated option.
    """
    options: dict[str, Read] = {}
    at += 1
    while not _skip(text, at, "}"):
        key = _KEY.match(text, at)
        if key is None:
            rest = re.split(r"[,}]", text[at:])[0].strip()
            raise ChainError(f"pass {name!r} has no option {rest!r}: write option=value, and a comma between two")
        if key[1] in options:
            raise ChainError(f"option {key[1]!r} of pass {name!r} appears twice: keep one")
        value, at = _read_value(text, key.end(), f"option {key[1]!r} of pass {name!r}")
        options[key[1]] = _Value(value, f"option {key[1]}={show(_tell(value))} of pass {name!r}")
        at = _skip(text, at, ",") or at
    return options, _skip(text, at, "}")


def _skip(text: str, at: int, mark: str) -> int:
    """Return the position after spaces and `mark`, or 0 if there is no `mark`.

    Raises ChainError at the end of the text.
    """
    found = _SPACE.match(text, at)
    at = found.end() if found else at
    if at >= len(text):
        raise ChainError(f"cannot read the chain {text!r}: a '}}' is missing")
    return at + 1 if text[at] == mark else 0


class _Bare(str):
    """A value without quotes, which may be a number."""


def _read_value(text: str, at: int, what: str, depth: int = 0) -> tuple[Any, int]:
    """Return the value at a position, a text or a list, and the position after it. Raises ChainError.

    what: names the option in the error. depth: how many lists the value lies in.
    """
    quoted = _QUOTED.match(text, at)
    if quoted is not None:
        try:
            return str(json.loads(quoted[0])), quoted.end()
        except ValueError as error:
            raise ChainError(f"{what}: {quoted[0]} is no text ({error}): escape characters as in JSON") from error
    if text[at : at + 1] == "[":
        if depth > DEEPEST:
            raise ChainError(f"{what} has more than {DEEPEST} lists inside each other")
        items = []
        at += 1
        while not _skip(text, at, "]"):
            space = _SPACE.match(text, at)
            item, at = _read_value(text, space.end() if space else at, what, depth + 1)
            items.append(item)
            if not _skip(text, at, "]"):
                at = _expect_comma(text, at, what)
        return items, _skip(text, at, "]")
    bare = _BARE.match(text, at)
    if bare is None or not bare[0].strip():
        raise ChainError(f'{what} has no value: write option=value, and an empty text as ""')
    return _Bare(bare[0].strip()), bare.end()


def _expect_comma(text: str, at: int, what: str) -> int:
    """Return the position after a comma. Raises ChainError if there is none."""
    end = _skip(text, at, ",")
    if not end:
        raise ChainError(f"{what}: a comma or ']' is missing before {text[at : at + 20]!r}")
    return end


def _tell(value: Any) -> Any:
    """Return a value as plain texts and lists, for messages."""
    return [_tell(item) for item in value] if isinstance(value, list) else str(value)


class _Value:
    """The value of an option before the option's type is known. `what`: names the option in messages."""

    def __init__(self, value: Any, what: str) -> None:
        self._value, self._what = value, what

    def __call__(self, hint: Any) -> Any:
        """Return the value in type `hint`. Raises ChainError for a value of another type."""
        if not _is_known(hint):
            raise ChainError(f"{self._what}: its type is {_tell_type(hint)}, which text cannot say: give it in Python")
        found = list(_convert(self._value, hint))
        if not found:
            raise ChainError(f"{self._what}: write {_describe(hint)}")
        return found[0]


def _convert(value: Any, hint: Any) -> list[Any]:
    """Return a list that holds the value in type `hint`, or an empty list if the value is not of that type."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        # A number is preferred to a text: a text that looks like one stands in quotes.
        kinds = sorted(get_args(hint), key=lambda kind: kind is str)
        return next((found for kind in kinds if (found := _convert(value, kind))), [])
    if origin in (tuple, list) or hint in (tuple, list):
        return _convert_list(value, hint)
    if origin is Literal:
        return [option for option in get_args(hint) if not isinstance(value, list) and str(option) == str(value)][:1]
    if isinstance(value, list):
        return []
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [hint[value]] if value in hint.__members__ else []
    if hint is str or not isinstance(value, _Bare):
        return [str(value)] if hint in (str, Any) or not _is_plain(hint) else []
    return _convert_bare(str(value), hint)


def _is_plain(hint: Any) -> bool:
    """Return whether a type is a number, a flag or None, which are written without quotes."""
    return hint in (bool, int, float, type(None))


def _convert_bare(text: str, hint: Any) -> list[Any]:
    """Return a list that holds a bare text as a value of type `hint`, or an empty list if it is not of that type."""
    if hint in (None, type(None)):
        return [None] if text == "none" else []
    if hint is bool:
        return [text == "true"] if text in ("true", "false") else []
    if hint in (int, float):
        try:
            return [hint(text)]
        except ValueError:
            return []
    return [text]


def _convert_list(value: Any, hint: Any) -> list[Any]:
    """Return a tuple or list as a list whose items have the type that `hint` gives; empty for another value."""
    if not isinstance(value, list):
        return []
    kind = list if list in (hint, get_origin(hint)) else tuple
    inner = get_args(hint)
    # tuple[int, str] has a type for each item, and tuple[int, ...] one for all.
    fixed = kind is tuple and inner and inner[-1] is not Ellipsis
    if fixed and len(inner) != len(value):
        return []
    items = [_convert(item, inner[i] if fixed else inner[0] if inner else str) for i, item in enumerate(value)]
    return [kind(item for (item,) in items)] if all(items) else []


def _find_item(hint: Any) -> Any:
    """Return the type of the items of a list; None if it is unknown, or if the items have several types."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next((kind for kind in get_args(hint) if get_origin(kind) in (tuple, list)), None)
    inner = [kind for kind in get_args(hint) if kind is not Ellipsis]
    return inner[0] if len(set(inner)) == 1 else None


def can_be_written(hint: Any, value: Any) -> bool:
    """Return whether the value of an option, written as text and read again, is the same value."""
    try:
        back, _ = _read_value(write_option(value, hint) + "}", 0, "")
        found = _convert(back, hint) if _is_known(hint) else []
    except ChainError:
        return False
    return bool(found) and type(found[0]) is type(value) and bool(found[0] == value)


def _is_known(hint: Any) -> bool:
    """Return whether the values of a type can be written as text."""
    origin = get_origin(hint)
    if origin is Literal or hint in (Any, str, bool, int, float, tuple, list, None, type(None)):
        return True
    if origin in (Union, types.UnionType, tuple, list):
        return all(_is_known(inner) for inner in get_args(hint) if inner is not Ellipsis)
    return isinstance(hint, type) and issubclass(hint, Enum)


def _tell_type(hint: Any) -> str:
    """Return the name of a type, for messages."""
    return hint.__qualname__ if isinstance(hint, type) else str(hint)


def _describe(hint: Any) -> str:
    """Return in words what to write for an option of a type, for messages."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(kind) for kind in get_args(hint))
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if origin in (tuple, list) or hint in (tuple, list):
        inner = _find_item(hint)
        if get_origin(inner) in (tuple, list):
            return "lists in a list, as [[a,b],[c]]"
        return "a list of numbers, as [1,2]" if inner in (int, float) else "a list in square brackets, as [a,b]"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    words = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
    return words.get(hint, "a text in quotes")
