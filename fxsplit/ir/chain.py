"""Chains: sequences of passes, and the text that they are written in.

`profile{repeats=3},augment,order,partition,emit` is a chain of five passes, the first with an option. A chain is read
from text by `parse_chain`, and `str(chain)` gives the text back.
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
# A pass and what ends it, a comma or the end of the text; dots and colons are for package.module:attribute.
_ITEM = re.compile(r"\s*(?P<name>[\w.:-]+)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?:,|$)")


@dataclasses.dataclass(frozen=True)
class Chain:
    """A sequence of passes, which never changes; `before`, `after` and `replace` return another chain.

    They find a pass by its name, and raise ChainError where the chain has none of that name.
    """

    passes: tuple[Pass, ...]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def before(self, name: str, *added: Pass) -> Chain:
        """Return the chain with `added` in front of the pass called `name`."""
        return self.replace(name, *added, self.passes[self._find(name)])

    def after(self, name: str, *added: Pass) -> Chain:
        """Return the chain with `added` behind the pass called `name`."""
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
        """One line: the hover of an editor shows the default chain."""
        return f"Chain({str(self)!r})"

    def __str__(self) -> str:
        return ",".join(pass_text(p) for p in self.passes)


def pass_text(step: Pass) -> str:
    """Return a pass as text: its name, and the options that differ from their defaults, as `profile{repeats=5}`."""
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
    """Return the chain that `text` describes; `known` are the passes that come with fxsplit, by name.

    A name is one of `known`, of an installed entry point in group `fxsplit.passes`, or `package.module:attribute`.
    Raises ChainError naming a pass, an option or a piece of text that is not understood.
    """
    passes = []
    at = 0
    # Item by item, so that an error shows the text from the place where reading stopped.
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
    """Return `passes` as a Chain, from a text, a Chain or several passes; raises ChainError for what is no pass."""
    if isinstance(passes, str):
        return parse_chain(passes, known)
    if not isinstance(passes, Iterable):
        raise ChainError(
            f"passes={passes!r}: give a Chain, a list of passes, or text such as 'profile,augment,order,partition,emit'"
        )
    chain = passes if isinstance(passes, Chain) else Chain(tuple(passes))
    for step in chain:
        # A class is callable, but calling it makes a pass and does not run one.
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
    # The default of an option says which type it is of, so a text needs no quotes.
    values = {}
    types = {f.name: f for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else {}
    for part in filter(None, (p.strip() for p in (options or "").split(","))):
        key, _, value = part.partition("=")
        if key not in types or not value:
            hint = suggest(key, types)
            raise ChainError(f"pass {name!r} has no option {part!r}: it has {', '.join(types) or 'none'}{hint}")
        values[key] = _read_scalar(name, key, value, types[key].default)
    # A pass checks itself when it is made, and an option without a default may be missing.
    try:
        made: Pass = found(**values)
    except TypeError as error:
        raise ChainError(f"pass {name!r} cannot be made with {{{options or ''}}}: {error}") from error
    return made


def _find_pass(name: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the class or function behind a name; raises ChainError, with what is known, where there is none."""
    if name in known:
        return known[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ChainError(f"cannot import the pass {name!r}: {error}") from error
    # Entry points are looked up last: reading what is installed takes time, and files of the user come first.
    outside = {point.name: point for point in entry_points(group="fxsplit.passes")}
    if name in outside:
        return outside[name].load()
    names = ", ".join([*known, *sorted(outside)])
    hint = suggest(name, [*known, *outside])
    raise ChainError(f"unknown pass {name!r}: known are {names}; a pass of yours is package.module:name{hint}")


def _read_scalar(name: str, key: str, text: str, default: Any) -> Scalar:
    """Return an option's value, of the type of its default; raises ChainError for a text of another type."""
    # Before numbers: in Python, True is an int.
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
    """Return the text of an option's value, as `_read_scalar` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
