"""Chains of passes, and their text form.

`profile{repeats=3},augment,order,partition,emit` is a chain of five passes, the first with an option. `parse_chain`
reads a chain from text, and `str(chain)` gives the text back.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, overload

from fxsplit.errors import ChainError, suggest
from fxsplit.ir.graph import Pass, is_own, name_pass
from fxsplit.ir.pass_options import can_be_written, find_hints, read_options, write_option

# The name of a pass. Dots and colons are for package.module:attribute.
_NAME = re.compile(r"\s*([\w.:-]+)\s*")
_NEXT = re.compile(r"\s*(?:,|$)")


@dataclasses.dataclass(frozen=True)
class Chain:
    """An immutable sequence of passes. `before`, `after`, `replace`, `until`, `from_` and `+` return a new chain.

    These methods find a pass by name, and raise ChainError if the chain has no pass of that name. `partition` is the
    first pass of that name, and `partition#2` the second.
    """

    passes: tuple[Pass, ...]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    @overload
    def __getitem__(self, at: int | str) -> Pass: ...
    @overload
    def __getitem__(self, at: slice) -> Chain: ...

    def __getitem__(self, at: int | str | slice) -> Pass | Chain:
        """Return the pass at a position or of a name, or the chain of a slice."""
        if isinstance(at, slice):
            return Chain(self.passes[at])
        return self.passes[self._find(at) if isinstance(at, str) else at]

    def __add__(self, other: Chain | Iterable[Pass]) -> Chain:
        """Return the chain of these passes, followed by the passes of `other`."""
        return Chain((*self.passes, *check_passes(other)))

    def __radd__(self, other: Iterable[Pass]) -> Chain:
        """Return the chain of the passes of `other`, followed by these passes."""
        return Chain((*check_passes(other), *self.passes))

    def before(self, name: str, *added: Pass) -> Chain:
        """Return the chain with `added` before the pass called `name`."""
        return self.replace(name, *added, self.passes[self._find(name)])

    def after(self, name: str, *added: Pass) -> Chain:
        """Return the chain with `added` after the pass called `name`."""
        return self.replace(name, self.passes[self._find(name)], *added)

    def replace(self, name: str, *others: Pass) -> Chain:
        """Return the chain with `others` in place of the pass called `name`."""
        at = self._find(name)
        return Chain((*self.passes[:at], *check_passes(others), *self.passes[at + 1 :]))

    def until(self, name: str) -> Chain:
        """Return the part of the chain that ends with the pass called `name`."""
        return Chain(self.passes[: self._find(name) + 1])

    def from_(self, name: str) -> Chain:
        """Return the part of the chain that begins with the pass called `name`."""
        return Chain(self.passes[self._find(name) :])

    def _find(self, name: str) -> int:
        """Return the position of the first pass called `name`. For `name#2`, return the position of the second."""
        names = [name_pass(p) for p in self.passes]
        own, _, number = name.partition("#")
        places = [i for i, other in enumerate(names) if other == own]
        wanted = int(number) if number.isdecimal() and len(number) < 6 else 1 if not number else 0
        if not 1 <= wanted <= len(places):
            raise ChainError(f"no pass {name!r} in this chain ({', '.join(names)}){suggest(name, names)}")
        return places[wanted - 1]

    def __repr__(self) -> str:
        """Return one line, since editors show the default chain on hover."""
        return f"Chain({str(self)!r})"

    def __str__(self) -> str:
        return ",".join(pass_text(p, importable=True) for p in self.passes)


def pass_text(step: Pass, *, importable: bool = False) -> str:
    """Return a pass as text: its name and the options that differ from their defaults, such as `profile{repeats=5}`.

    importable: give a pass that is not fxsplit's own the name by which it can be imported, `package.module:attribute`.
    """
    name = (_find_import(step) if importable and not is_own(step) else None) or name_pass(step)
    # A plain function is a pass too, and has no options.
    if not dataclasses.is_dataclass(step):
        return name
    kind: Any = type(step)
    hints = find_hints(kind)
    options = [
        f"{f.name}={write_option(getattr(step, f.name), hints.get(f.name))}"
        for f in dataclasses.fields(step)
        if f.init and not _is_default(f, getattr(step, f.name))
    ]
    return name + (f"{{{','.join(options)}}}" if options else "")


def can_be_named(step: Pass) -> bool:
    """Return whether the text of a pass can be read in another process: the pass is fxsplit's, or can be imported."""
    if not is_own(step) and _find_import(step) is None:
        return False
    if not dataclasses.is_dataclass(step):
        return True
    kind: Any = type(step)
    hints = find_hints(kind)
    own = [f for f in dataclasses.fields(step) if f.init and not _is_default(f, getattr(step, f.name))]
    return all(can_be_written(hints.get(f.name, Any), getattr(step, f.name)) for f in own)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether an option has its default, in value and type."""
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    # 1 == True, and a chain that is read again should be the same.
    return type(value) is type(default) and bool(value == default)


def _find_import(step: Any) -> str | None:
    """Return the name by which a pass, or its class, can be imported; None for a class in a function or a notebook."""
    held = type(step) if dataclasses.is_dataclass(step) else step
    module, name = getattr(held, "__module__", None), getattr(held, "__qualname__", None)
    importable = module and module != "__main__" and name and name.replace(".", "").isidentifier()
    return f"{module}:{name}" if importable else None


def parse_chain(text: str, known: Mapping[str, Callable[..., Any]], *, imports: bool = True) -> Chain:
    """Return the chain that `text` describes.

    known: fxsplit's own passes, by name.
    imports: whether a name may also be an installed entry point of the group `fxsplit.passes`, or
        `package.module:attribute`.
    Raises ChainError that names the pass, the option or the piece of text that could not be read.
    """
    passes = []
    at = 0
    # Read item by item, so that an error shows the text from the place where reading stopped.
    while at < len(text.rstrip()):
        begin = at
        name = _NAME.match(text, at)
        options: dict[str, Any] = {}
        if name is not None:
            at = name.end()
            if text[at : at + 1] == "{":
                options, at = read_options(text, at, name[1])
        end = _NEXT.match(text, at)
        if name is None or end is None:
            raise ChainError(
                f"cannot read the chain {text!r} from {text[begin:]!r}: write name{{option=value}},name,..."
            )
        if not imports and name[1] not in known:
            raise ChainError(f"{name[1]!r} is no pass of fxsplit, and nothing is imported here")
        passes.append(_create_pass(name[1], options, known))
        at = end.end()
    if not passes:
        raise ChainError("an empty chain: write for example 'profile,augment,order,partition,emit'")
    return Chain(tuple(passes))


def to_chain(passes: str | Chain | Iterable[Pass], known: Mapping[str, Callable[..., Any]]) -> Chain:
    """Return `passes` (text, a Chain or several passes) as a Chain.

    Raises ChainError for an object that is not a pass.
    """
    if isinstance(passes, str):
        return parse_chain(passes, known)
    if not isinstance(passes, Iterable):
        raise ChainError(
            f"passes={passes!r}: give a Chain, a list of passes, or text such as 'profile,augment,order,partition,emit'"
        )
    return Chain(check_passes(passes))


def check_passes(passes: Iterable[Any]) -> tuple[Pass, ...]:
    """Return `passes` as a tuple. Raises ChainError for an object that is not a pass."""
    steps = tuple(passes)
    for step in steps:
        # A class is callable too, but calling it makes a pass instead of running one.
        if isinstance(step, type) or not callable(step):
            raise ChainError(
                f"{step!r} is not a pass: give a function from IR to IR, or an instance of a pass class; names go into "
                "one text, such as 'profile,augment,order,partition,emit'"
            )
    return steps


def _create_pass(name: str, options: Mapping[str, Any], known: Mapping[str, Callable[..., Any]]) -> Pass:
    """Return the pass called `name` with these options, which are read from text.

    Raises ChainError for a wrong option.
    """
    found = find_pass(name, known)
    runs = any("__call__" in vars(kind) for kind in found.__mro__) if isinstance(found, type) else callable(found)
    if not runs:
        raise ChainError(f"{name!r} is no pass: give a function from IR to IR, or a class with __call__(self, ir)")
    if not isinstance(found, type):
        if options:
            raise ChainError(f"pass {name!r} is a plain function and has no options, not {', '.join(options)}")
        step: Pass = found
        return step
    fields = {f.name: f for f in dataclasses.fields(found) if f.init} if dataclasses.is_dataclass(found) else {}
    hints = find_hints(found)
    values = {}
    for key, read in options.items():
        if key not in fields:
            hint = suggest(key, fields)
            raise ChainError(f"pass {name!r} has no option {key!r}: it has {', '.join(fields) or 'none'}{hint}")
        values[key] = read(hints.get(key, type(fields[key].default)))
    # A pass checks its own options when it is created. An option without a default may be missing.
    try:
        made: Pass = found(**values)
    except TypeError as error:
        raise ChainError(
            f"pass {name!r} cannot be made with the options {', '.join(values) or 'none'}: {error}"
        ) from error
    return made


def find_pass(name: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the class or function called `name`. Raises ChainError, with the known names, if there is none."""
    if name in known:
        return known[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except Exception as error:  # the module is the user's code
            what = (
                str(error) if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {error}"
            )
            raise ChainError(f"cannot import the pass {name!r}: {what}") from error
        return found
    # Entry points come last: reading the installed packages takes time, and the user's own files have priority.
    outside = list_installed()
    if name in outside:
        return load_installed(outside[name])
    names = ", ".join([*known, *sorted(outside)])
    hint = suggest(name, [*known, *outside])
    raise ChainError(f"unknown pass {name!r}: known are {names}; a pass of yours is package.module:name{hint}")


def list_installed() -> dict[str, EntryPoint]:
    """Return the passes of installed packages by name: the entry points of the group `fxsplit.passes`."""
    return {point.name: point for point in entry_points(group="fxsplit.passes")}


def load_installed(point: EntryPoint) -> Any:
    """Return the pass of an installed package; raises ChainError, with the package, if it cannot be imported."""
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist else "an installed package"
        what = f"{type(error).__name__}: {error}"
        raise ChainError(f"pass {point.name!r} of {package} cannot be imported ({point.value}): {what}") from error
