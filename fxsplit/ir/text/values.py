"""Values of the IR's text: numbers, strings, lists, nodes, and names of torch's constants.

    %relu  12  1.5  inf  true  none  "text"  word  #float32  device("cpu")  slice(none, 2, none)  ...  [1]  (1,)  {a: 1}

Reading gives plain Python values and the classes of this file: nothing is imported or evaluated, and torch stays out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fxsplit.ir.text.tokens import Token, Tokens, describe
from fxsplit.system.figures import show

WIDTH = 100
"""A list with more characters is written over several lines."""

DEEPEST = 100
"""The most brackets inside each other. More are refused, since each takes a call on Python's stack."""

FindNode = Callable[[str, Token], Any]
"""A function that returns the node of a name. It raises IRSyntaxError, at the token, for an unknown name."""


@dataclass(frozen=True)
class TorchName:
    """A dtype, a layout or a memory format by its name in torch: `#float32` is torch.float32."""

    name: str


@dataclass(frozen=True)
class DeviceName:
    """The name of a torch device, such as `cuda:0`, in a machine that is read from a file: planning needs no torch."""

    name: str

    @property
    def type(self) -> str:
        """The kind of the device: `cuda`."""
        return self.name.partition(":")[0]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Opaque:
    """The repr of a value that the text cannot hold. A graph with such a value can be planned, but does not run."""

    text: str


_CONSTANTS = {"none": None, "true": True, "false": False, "inf": float("inf"), "-inf": float("-inf"), "...": ...}
_CONSTANTS |= {"nan": float("nan")}
_WORD = re.compile(r"[\w<][\w.<>*/+@-]*(?::[\w.<>*/+@-]+)*", re.ASCII)
_INT = re.compile(r"[+-]?\d{1,400}")
_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d{1,4})?")
_NAME = re.compile(r"[\w.<>$-]+", re.ASCII)


def write_value(value: Any, name_of: Callable[[Any], str | None] = lambda value: None) -> str:
    """Return a value as text, in one line; `name_of` returns the name of a node, and None for another value."""
    name = name_of(value)
    if name is not None:
        return write_name(name)
    for constant in ("none", "true", "false", "..."):
        if value is _CONSTANTS[constant]:
            return constant
    if isinstance(value, str):
        return json.dumps(value)
    if type(value) in (int, float):
        # repr gives the shortest text that reads back as the same number; inf, -inf and nan are words here too.
        return repr(value)
    if isinstance(value, TorchName):
        return f"#{value.name}"
    if isinstance(value, DeviceName):
        return f"device({json.dumps(value.name)})"
    if type(value) is slice:
        return f"slice({', '.join(write_value(v, name_of) for v in (value.start, value.stop, value.step))})"
    # Subclasses too: fx keeps lists of its own, and torch.Size is a tuple.
    if isinstance(value, (list, tuple)):
        inner = ", ".join(write_value(v, name_of) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{write_value(k, name_of)}: {write_value(v, name_of)}' for k, v in value.items())}}}"
    return f"opaque({json.dumps(value.text if isinstance(value, Opaque) else show(value, 200))})"


def write_word(value: Any) -> str:
    """Return a value of a fact as text: names without quotes, and all others as `write_value` writes them."""
    if isinstance(value, str) and _WORD.fullmatch(value) and not _is_other(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(write_word, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{write_word(k)}: {write_word(v)}' for k, v in value.items())}}}"
    return write_value(value)


def _is_other(word: str) -> bool:
    """Return whether a word would read back as a constant or a number, so that a text needs quotes."""
    return word in _CONSTANTS or _INT.fullmatch(word) is not None or _FLOAT.fullmatch(word) is not None


def write_name(name: str) -> str:
    """Return the name of a node as text: `%relu`, or in quotes if it has unusual characters: `%"any name"`."""
    return f"%{name}" if _NAME.fullmatch(name) else f"%{json.dumps(name)}"


def read_value(tokens: Tokens, find_node: FindNode | None = None) -> Any:
    """Return the next value; raises IRSyntaxError if none follows. `find_node` looks up nodes; None refuses nodes."""
    token = tokens.next
    if token.kind == "string":
        tokens.take()
        return tokens.unquote(token)
    if token.kind == "name":
        if find_node is None:
            tokens.fail(f"{token.text} is a node, and there are no nodes here: write its name without %")
        tokens.take()
        return find_node(read_name(tokens, token), token)
    if token.kind == "word":
        tokens.take()
        if tokens.next.text == "(" and token.text in ("device", "slice", "opaque"):
            return _read_call(tokens, token, find_node)
        return _read_word(tokens, token)
    if token.text not in ("(", "[", "{"):
        tokens.fail(f"a value is missing before {describe(token)}")
    tokens.depth += 1
    if tokens.depth > DEEPEST:
        tokens.fail(f"more than {DEEPEST} brackets inside each other")
    value = _read_dict(tokens, find_node) if token.text == "{" else _read_list(tokens, find_node)
    tokens.depth -= 1
    return value


def read_name(tokens: Tokens, token: Token) -> str:
    """Return the name in a token such as `%relu` or `%"any name"`."""
    return tokens.unquote(token) if token.text.startswith('%"') else token.text[1:]


def _read_word(tokens: Tokens, token: Token) -> Any:
    """Return the value of a word: a constant, a number, a name in torch, or the word itself."""
    text = token.text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        return value if isfinite(value) else tokens.fail(f"{text} is too large for a number: write inf", token)
    if text.startswith("#"):
        return TorchName(text[1:])
    if _WORD.fullmatch(text):
        return text
    return tokens.fail(f"{show(text)} is no value: put a text in quotes", token)


def _read_call(tokens: Tokens, head: Token, find_node: FindNode | None) -> Any:
    """Return the value of `device("cpu")`, `slice(1, 2, none)` or `opaque("...")`.

    `head` is the word before the bracket.
    """
    tokens.depth += 1
    if tokens.depth > DEEPEST:
        tokens.fail(f"more than {DEEPEST} brackets inside each other")
    given = _read_list(tokens, find_node)
    tokens.depth -= 1
    if head.text == "slice" and len(given) == 3:
        return slice(*given)
    if head.text != "slice" and len(given) == 1 and isinstance(given[0], str):
        return DeviceName(given[0]) if head.text == "device" else Opaque(given[0])
    needs = "three values" if head.text == "slice" else "one string"
    return tokens.fail(f"{head.text}(...) needs {needs}", head)


def _read_list(tokens: Tokens, find_node: FindNode | None) -> Any:
    """Return a list in square brackets, or a tuple in round ones."""
    opening = tokens.take()
    closing = "]" if opening.text == "[" else ")"
    values = []
    while not tokens.accept(closing):
        values.append(read_value(tokens, find_node))
        if not tokens.accept(",") and tokens.next.text != closing:
            tokens.fail(f"a comma or {closing!r} is missing before {describe(tokens.next)}")
    return values if closing == "]" else tuple(values)


def _read_dict(tokens: Tokens, find_node: FindNode | None) -> dict[Any, Any]:
    """Return a dict in braces."""
    tokens.take()
    values: dict[Any, Any] = {}
    while not tokens.accept("}"):
        at = tokens.next
        key = read_value(tokens, find_node)
        if not isinstance(key, (str, int, float, type(None))):
            tokens.fail("a key must be a word, a string or a number", at)
        if key in values:
            tokens.fail(f"{show(key)} appears twice", at)
        tokens.expect(":", "a key")
        values[key] = read_value(tokens, find_node)
        if not tokens.accept(",") and tokens.next.text != "}":
            tokens.fail(f"a comma or '}}' is missing before {describe(tokens.next)}")
    return values
