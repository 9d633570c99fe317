"""PythonState: the Python values that forward() read during the capture. It checks whether they have changed since.

A graph holds operators on tensors. `forward()` also reads Python values, such as `self.scale`, a global, or a setting
of torch, and the results become constants of the graph. So these values are compared before every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, time, timedelta
from enum import Enum
from operator import is_
from typing import Any, ClassVar, Final
from uuid import UUID

from fxsplit.ir.graph import GivenFact
from fxsplit.system.figures import show
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.contents import Contents, has_contents
from fxsplit.torch_internals.nn.objects import VALUES, Opaque, is_a, same_constant, take_apart

MOST_LETTERS = 80
"""The longest text of a value in a message."""


ARGUMENT = -1
"""The first part of the key of a place that is an argument of forward(). Other places have an id() there."""

DATES = (date, time, timedelta, UUID)
"""Types compared by value, in addition to the types that may be arguments of a call."""


class _Absent:
    """The type of ABSENT."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()
"""Stands for the value of an attribute or entry that does not exist."""


@dataclass(frozen=True, eq=False)
class Place:
    """The place of a Python value: an attribute, a global, an entry, a closure's variable, or a setting of torch.

    - `name`: the place in words, for example "attribute 'body.scale' of the model"
    - `read`: returns the present value, or ABSENT. A container is read as a tuple of its items, a tensor or an array as
      its Contents
    - `write`: sets the value; None if it is read-only
    - `key`: identifies the place as long as its owner is alive
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None = None
    key: tuple[int, str] = (0, "")


class Cached:
    """The contents of a cache after a call has filled it. Tensors, arrays and containers in `value` are copied.

    A graph made with an empty cache is also right with a filled cache, if the cache has these contents.
    """

    def __init__(self, value: Any) -> None:
        leaves, self._structure = _flatten(value)
        self._leaves = [Contents(leaf).keep() if has_contents(leaf) else leaf for leaf in leaves]

    def holds(self, value: Any) -> bool:
        """Return whether a value equals the contents."""
        leaves, structure = _flatten(value)
        return structure == self._structure and all(map(_is_alike, self._leaves, leaves))


def _flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value, including those of objects inside it, and their structure."""
    return pytree.tree_flatten(pytree.tree_map(take_apart, value))


def _is_alike(kept: Any, leaf: Any) -> bool:
    """Return whether a leaf equals the kept leaf.

    A leaf that cannot be taken apart never does: its value is unknown.
    """
    if is_a(kept, Contents):
        return has_contents(leaf) and kept.moves_to(leaf)
    return not is_a(leaf, Opaque) and same_constant(kept, leaf)


@dataclass(frozen=True, eq=False)
class NumberPlace:
    """The place of a number that is, or may become, an input of a graph.

    `known`: two different values that it has had.
    """

    place: Place
    known: tuple[float, float]

    @property
    def is_argument(self) -> bool:
        """Whether the number is an argument of forward(), so that each call has its own."""
        return self.place.key[0] == ARGUMENT

    @property
    def other(self) -> float:
        """A value other than the present value, to test whether a graph computes with the number or is fixed to it."""
        return next(value for value in self.known if not same(value, self.place.read()))


@dataclass(frozen=True, eq=False)
class PythonState(GivenFact):
    """The places that forward() read, each with its value during the capture.

    - `followed`: numbers that are inputs of the graph, in the order of its placeholders
    - `stuck`: keys of places with changed numbers that cannot be inputs, since forward() does more than arithmetic
      with them
    - `cached`: the contents of places that a call fills, by the keys of the places
    """

    reads: tuple[tuple[Place, Any], ...] = ()
    followed: tuple[NumberPlace, ...] = ()
    stuck: frozenset[tuple[int, str]] = frozenset()
    cached: Mapping[tuple[int, str], Cached] = field(default_factory=dict)

    made_by: ClassVar[str] = "trace"

    def find_changes(self) -> dict[str, tuple[str, str]]:
        """Return the places that have another value than during the capture: name -> (then, now), in words."""
        # This runs before every call. Nearly always each place still holds the very same object.
        found = ((place, then, place.read()) for place, then in self.reads)
        differ = ((p, then, now) for p, then, now in found if now is not then and not same(then, now))
        made = {p.name: describe_change(then, now) for p, then, now in differ if not self._is_filled(p, now)}
        if self.followed:
            given = ((number.place, number.place.read()) for number in self.followed if not number.is_argument)
            made |= {place.name: ("a number", describe(now)) for place, now in given if type(now) is not float}
        return made

    def _is_filled(self, place: Place, now: Any) -> bool:
        """Return whether a place is a cache that now has the contents which a call fills in."""
        cached = self.cached.get(place.key)
        return cached is not None and cached.holds(now)

    def list_numbers(self) -> list[NumberPlace]:
        """Return the numbers that may be inputs of a new graph: the present inputs, and floats that have changed."""
        reads = ((p, v) for p, v in self.reads if type(v) is float and p.write is not None and p.key not in self.stuck)
        found = ((place, then, place.read()) for place, then in reads)
        changed = [NumberPlace(p, (v, now)) for p, v, now in found if type(now) is float and not same(v, now)]
        numbers = (number for number in (*self.followed, *changed) if not number.is_argument)
        return [number for number in numbers if type(number.place.read()) is float]

    def follow(self, numbers: Sequence[NumberPlace], followed: Sequence[NumberPlace]) -> PythonState:
        """Return the state for a new graph: `numbers` were tried as its inputs, and only `followed` became inputs."""
        keys = {number.place.key for number in followed}
        stuck = self.stuck | ({number.place.key for number in numbers} - keys)
        reads = tuple((place, value) for place, value in self.reads if place.key not in keys)
        return replace(self, reads=reads, followed=tuple(followed), stuck=stuck)

    def read_numbers(self, arguments: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the current value of each Python number that is an input of the graph.

        arguments: the values of a call's arguments, by name.
        """
        return tuple(arguments[n.place.key[1]] if n.is_argument else n.place.read() for n in self.followed)

    def __str__(self) -> str:
        """Return a line for each place that holds a number, a text or the like; objects have no stable text."""
        lines = [f"{number.place.name}: an input" for number in self.followed]
        lines += [f"{place.name}: {then!r}" for place, then in self.reads if is_plain(then)]
        return "\n".join(lines) or "nothing plain"


def same(then: Any, now: Any) -> bool:
    """Return whether two values of one place are the same for a graph.

    Numbers, texts and the like are compared by value, tuples item by item, and all other objects by identity: two
    objects that are equal by a user's `__eq__` may still give different results in forward().
    """
    if is_a(then, Contents):
        return is_a(now, Contents) and then.matches(now)
    if not is_a(then, (tuple, frozenset)) or type(then) is not type(now):
        return same_constant(then, now) or (is_a(then, DATES) and bool(then == now))
    if is_a(then, frozenset):
        plain = is_plain(then)
        return frozenset.__eq__(then, now) if plain else {*map(id, _iterate(then))} == {*map(id, _iterate(now))}
    if type(then) is not tuple:
        then, now = tuple(_iterate(then)), tuple(_iterate(now))
    return len(then) == len(now) and (all(map(is_, then, now)) or all(map(same, then, now)))


def is_plain(value: Any) -> bool:
    """Return whether a value is immutable: a number, a text, a dtype or the like, or a tuple of such values."""
    if is_a(value, (tuple, frozenset)):
        return all(map(is_plain, _iterate(value)))
    return value is ... or is_a(value, (*VALUES, *DATES, Enum))


def _iterate(value: Any) -> Iterator[Any]:
    """Return an iterator over the items of a tuple or frozenset, even if its class overrides `__iter__`."""
    return tuple.__iter__(value) if is_a(value, tuple) else frozenset.__iter__(value)


def describe_change(then: Any, now: Any) -> tuple[str, str]:
    """Return texts for two different values. The texts differ too."""
    before, after = describe(then), describe(now)
    if before != after:
        return before, after
    return before, "other values" if is_a(now, Contents) else f"another {type(now).__name__}"


def describe(value: Any) -> str:
    """Return a value in words, short enough for a message."""
    if value is ABSENT or is_a(value, Contents) or is_plain(value):
        return show(value, MOST_LETTERS)
    with suppress(Exception):  # code of the user may answer
        if isinstance(name := getattr(value, "__qualname__", None), str):
            return name
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"
