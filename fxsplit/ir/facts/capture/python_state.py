"""PythonState: the Python values that forward() read while it was captured, and whether they have changed since.

A graph holds operators on tensors. `forward()` also reads Python values, such as `self.scale`, a global, or a setting
of torch, and the graph keeps what was computed with them. So such a value is compared before every call.
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
"""In the key of a place: that it is an argument of forward(), under its name. Other places have an identity there."""

DATES = (date, time, timedelta, UUID)
"""Values that compare as their users expect, besides those that may be arguments of a call."""


class _Absent:
    """The type of ABSENT."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT: Final = _Absent()
"""Stands for the value of an attribute or entry that does not exist."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a Python value is kept: an attribute, a global, an entry, a closure's variable, or a setting of torch.

    name: the place in words, for example "attribute 'body.scale' of the model". read: returns the value now; ABSENT
    where there is none. A container is read as a tuple of what it holds, a tensor or an array as its Contents. write:
    sets the value; None where nobody may. key: tells the place from all others, as long as something holds what it is
    in.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None = None
    key: tuple[int, str] = (0, "")


class Cached:
    """What a cache holds once a call has filled it; `value` is copied as far as it is tensors, arrays and containers.

    A graph made with an empty cache is right with a filled one too, for the same value.
    """

    def __init__(self, value: Any) -> None:
        leaves, self._structure = _flatten(value)
        self._leaves = [Contents(leaf).keep() if has_contents(leaf) else leaf for leaf in leaves]

    def holds(self, value: Any) -> bool:
        """Return whether a value holds the same."""
        leaves, structure = _flatten(value)
        return structure == self._structure and all(map(_is_alike, self._leaves, leaves))


def _flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value, and of the objects in it, with their structure."""
    return pytree.tree_flatten(pytree.tree_map(take_apart, value))


def _is_alike(kept: Any, leaf: Any) -> bool:
    """Return whether a leaf is what was kept of another one; of what cannot be taken apart nothing is known."""
    if is_a(kept, Contents):
        return has_contents(leaf) and kept.moves_to(leaf)
    return not is_a(leaf, Opaque) and same_constant(kept, leaf)


@dataclass(frozen=True, eq=False)
class NumberPlace:
    """A place that holds a number which is an input of a graph, or is to be one; `known` are two values it has had."""

    place: Place
    known: tuple[float, float]

    @property
    def is_argument(self) -> bool:
        """Whether the number is an argument of forward(), which each call has of its own."""
        return self.place.key[0] == ARGUMENT

    @property
    def other(self) -> float:
        """A value other than that of now, to tell whether a graph computes with the number or holds it."""
        return next(value for value in self.known if not same(value, self.place.read()))


@dataclass(frozen=True, eq=False)
class PythonState(GivenFact):
    """The places that forward() read, each with the value that it had when the graph was captured.

    followed: numbers that are inputs of the graph, in the order of its placeholders. stuck: the keys of places whose
    numbers have changed and could not be made inputs, since forward() does more than compute with them. cached: by the
    keys of places that a call fills, what they hold then.
    """

    reads: tuple[tuple[Place, Any], ...] = ()
    followed: tuple[NumberPlace, ...] = ()
    stuck: frozenset[tuple[int, str]] = frozenset()
    cached: Mapping[tuple[int, str], Cached] = field(default_factory=dict)

    made_by: ClassVar[str] = "trace"

    def find_changes(self) -> dict[str, tuple[str, str]]:
        """Return the places that hold another value than when the graph was captured: name -> (then, now)."""
        # Asked before every call. Nearly always each place still holds the very same object.
        found = ((place, then, place.read()) for place, then in self.reads)
        differ = ((p, then, now) for p, then, now in found if now is not then and not same(then, now))
        made = {p.name: describe_change(then, now) for p, then, now in differ if not self._is_filled(p, now)}
        if self.followed:
            given = ((number.place, number.place.read()) for number in self.followed if not number.is_argument)
            made |= {place.name: ("a number", describe(now)) for place, now in given if type(now) is not float}
        return made

    def _is_filled(self, place: Place, now: Any) -> bool:
        """Return whether a place is a cache that holds what a call fills it with."""
        cached = self.cached.get(place.key)
        return cached is not None and cached.holds(now)

    def list_numbers(self) -> list[NumberPlace]:
        """Return what may be an input of a new graph: the numbers followed, and the floats that have changed."""
        reads = ((p, v) for p, v in self.reads if type(v) is float and p.write is not None and p.key not in self.stuck)
        found = ((place, then, place.read()) for place, then in reads)
        changed = [NumberPlace(p, (v, now)) for p, v, now in found if type(now) is float and not same(v, now)]
        numbers = (number for number in (*self.followed, *changed) if not number.is_argument)
        return [number for number in numbers if type(number.place.read()) is float]

    def follow(self, numbers: Sequence[NumberPlace], followed: Sequence[NumberPlace]) -> PythonState:
        """Return what is known of a graph that was to have `numbers` as inputs, and has those of `followed`."""
        keys = {number.place.key for number in followed}
        stuck = self.stuck | ({number.place.key for number in numbers} - keys)
        reads = tuple((place, value) for place, value in self.reads if place.key not in keys)
        return replace(self, reads=reads, followed=tuple(followed), stuck=stuck)

    def read_numbers(self, arguments: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the numbers that are inputs of the graph, as they are now; those of a call are in `arguments`."""
        return tuple(arguments[n.place.key[1]] if n.is_argument else n.place.read() for n in self.followed)

    def __str__(self) -> str:
        """One line for each place that holds a number, a text or the like; objects have no text that lasts."""
        lines = [f"{number.place.name}: an input" for number in self.followed]
        lines += [f"{place.name}: {then!r}" for place, then in self.reads if is_plain(then)]
        return "\n".join(lines) or "nothing plain"


def same(then: Any, now: Any) -> bool:
    """Return whether two values of one place are the same to a graph.

    Numbers, texts and the like are compared by value, tuples item by item, all other objects by identity: what an
    `__eq__` of the user's says of two objects is not whether forward() computes the same with both.
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
    """Return whether a value is a number, a text, a dtype or the like, or a tuple of those, which nobody can change."""
    if is_a(value, (tuple, frozenset)):
        return all(map(is_plain, _iterate(value)))
    return value is ... or is_a(value, (*VALUES, *DATES, Enum))


def _iterate(value: Any) -> Iterator[Any]:
    """Return an iterator over the items of a tuple or frozenset, whose own class may refuse to be iterated over."""
    return tuple.__iter__(value) if is_a(value, tuple) else frozenset.__iter__(value)


def describe_change(then: Any, now: Any) -> tuple[str, str]:
    """Return two values in words, that differ."""
    before, after = describe(then), describe(now)
    if before != after:
        return before, after
    return before, "other values" if is_a(now, Contents) else f"another {type(now).__name__}"


def describe(value: Any) -> str:
    """Return a value in words, short enough for a message."""
    if value is ABSENT or is_a(value, Contents) or is_plain(value):
        return show(value, MOST_LETTERS)
    with suppress(Exception):  # code of the user's may answer
        if isinstance(name := getattr(value, "__qualname__", None), str):
            return name
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"
