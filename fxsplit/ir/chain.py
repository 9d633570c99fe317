"""Chains of passes, and their text form.

`profile{repeats=3},augment,order,partition,emit` is a chain of five passes, the first with an option. `parse_chain`
reads a chain from text, and `str(chain)` gives the text back.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from fxsplit.errors import ChainError, suggest
from fxsplit.ir.graph import Pass, name_pass
from fxsplit.system.figures import show

Scalar = str | int | float | bool
# A pass, up to the comma or the end of the text. Dots and colons are for package.module:attribute.
_ITEM = re.compile(r"\s*(?P<name>[\w.:-]+)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?:,|$)")


@dataclasses.dataclass(frozen=True)
class Chain:
    """An immutable sequence of passes; `before`, `after` and `replace` return a new chain.

    They find a pass by name, and raise ChainError if the chain has no pass of that name.
    """

    passes: tuple[Pass, ...]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def before(self, name: str, *added: Pass) -> Chain:
        """Return the chain with `added` before the pass called `name`."""
        return self.replace(name, *added, self.passes[self._find(name)])

    def after(self, name: str, *added: Pass) -> Chain:
        """Return the chain with `added` after the pass called `name`."""
        return self.replace(name, self.passes[self._find(name)], *added)

    def replace(self, name: str, *others: Pass) -> Chain:
        """Return the chain with `others` in place of the pass called `name`."""
        at = self._find(name)
        return Chain((*self.passes[:at], *others, *self.passes[at + 1 :]))

    def _find(self, name: str) -> int:
        """Return the position of the first pass called `name`."""
        names = [name_pass(p) for p in self.passes]
        if name not in names:
            raise ChainError(f"no pass {name!r} in this chain ({', '.join(names)}){suggest(name, names)}")
        return names.index(name)

    def __repr__(self) -> str:
        """Return one line, since editors show the default chain on hover."""
        return f"Chain({str(self)!r})"

    def __str__(self) -> str:
        return ",".join(pass_text(p) for p in self.passes)


def pass_text(step: Pass) -> str:
    """Return a pass as text: its name and the options that differ from their defaults, such as `profile{repeats=5}`."""
    # A plain function is a pass too, and has no options.
    if not dataclasses.is_dataclass(step):
        return name_pass(step)
    options = [
        f"{f.name}={_write_scalar(getattr(step, f.name))}"
        for f in dataclasses.fields(step)
        if getattr(step, f.name) != f.default
    ]
    return name_pass(step) + (f"{{{','.join(options)}}}" if options else "")


def parse_chain(text: str, known: Mapping[str, Callable[..., Any]]) -> Chain:
    """Return the chain that `text` describes; `known` maps the names of fxsplit's own passes to them.

    A name is one of `known`, an installed entry point of the group `fxsplit.passes`, or `package.module:attribute`.
    Raises ChainError that names the pass, the option or the piece of text that could not be read.
    """
    passes = []
    at = 0
    # Read item by item, so that an error shows the text from the place where reading stopped.
    while at < len(text.rstrip()):
        match = _ITEM.match(text, at)
        if match is None:
            raise ChainError(f"cannot read the chain {text!r} from {text[at:]!r}: write name{{option=value}},name,...")
        passes.append(_create_pass(match["name"], match["options"], known))
        at = match.end()
    if not passes:
        raise ChainError("an empty chain: write for example 'profile,augment,order,partition,emit'")
    return Chain(tuple(passes))


def to_chain(passes: str | Chain | Iterable[Pass], known: Mapping[str, Callable[..., Any]]) -> Chain:
    """Return `passes` (text, a Chain or several passes) as a Chain; raises ChainError for an object that is no pass."""
    if isinstance(passes, str):
        return parse_chain(passes, known)
    if not isinstance(passes, Iterable):
        raise ChainError(
            f"passes={passes!r}: give a Chain, a list of passes, or text such as 'profile,augment,order,partition,emit'"
        )
    chain = passes if isinstance(passes, Chain) else Chain(tuple(passes))
    for step in chain:
        # A class is callable too, but calling it makes a pass instead of running one.
        if isinstance(step, type) or not callable(step):
            raise ChainError(
                f"{step!r} is not a pass: give a function from IR to IR, or an instance of a pass class; names go into "
                "one text, such as 'profile,augment,order,partition,emit'"
            )
    return chain


def _create_pass(name: str, options: str | None, known: Mapping[str, Callable[..., Any]]) -> Pass:
    """Return the pass called `name` with its options, the text between braces; raises ChainError for a wrong option."""
    found = _find_pass(name, known)
    if not isinstance(found, type):
        if options:
            raise ChainError(f"pass {name!r} is a plain function and has no options, not {{{options}}}")
        step: Pass = found
        return step
    # The default of an option gives its type, so the text needs no quotes.
    values = {}
    types = {f.name: f for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else {}
    for part in filter(None, (p.strip() for p in (options or "").split(","))):
        key, _, value = part.partition("=")
        if key not in types or not value:
            hint = suggest(key, types)
            raise ChainError(f"pass {name!r} has no option {part!r}: it has {', '.join(types) or 'none'}{hint}")
        values[key] = _read_scalar(name, key, value, types[key].default)
    # A pass checks its own options when it is created. An option without a default may be missing.
    try:
        made: Pass = found(**values)
    except TypeError as error:
        raise ChainError(f"pass {name!r} cannot be made with {{{options or ''}}}: {error}") from error
    return made


def _find_pass(name: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the class or function called `name`; raises ChainError, with the known names, if there is none."""
    if name in known:
        return known[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ChainError(f"cannot import the pass {name!r}: {error}") from error
    # Entry points come last: reading the installed packages takes time, and the user's own files have priority.
    outside = {point.name: point for point in entry_points(group="fxsplit.passes")}
    if name in outside:
        return outside[name].load()
    names = ", ".join([*known, *sorted(outside)])
    hint = suggest(name, [*known, *outside])
    raise ChainError(f"unknown pass {name!r}: known are {names}; a pass of yours is package.module:name{hint}")


def _read_scalar(name: str, key: str, text: str, default: Any) -> Scalar:
    """Return the value of an option, in the type of its default; raises ChainError for text of another type."""
    # bool comes before the numbers: in Python, True is an int.
    if isinstance(default, bool):
        if text in ("true", "false"):
            return text == "true"
        raise ChainError(f"option {key}={text!r} of pass {name!r}: write true or false")
    if isinstance(default, (int, float)):
        try:
            return type(default)(text)
        except ValueError as error:
            raise ChainError(f"option {key}={show(text)} of pass {name!r}: write a number") from error
    return text


def _write_scalar(value: Scalar) -> str:
    """Return the value of an option as text that `_read_scalar` can read."""
    return str(value).lower() if isinstance(value, bool) else str(value)
