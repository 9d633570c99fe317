"""PythonState: the Python values that forward() read while it was captured, and whether they have changed since.

A graph holds operators on tensors. `forward()` also reads Python values, such as `self.scale`, a global, or a setting
of torch, and the graph keeps what was computed with them. So such a value is compared before every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time, timedelta
from enum import Enum
from operator import is_
from typing import Any, ClassVar, Final
from uuid import UUID

from fxsplit.ir.facts.figures import show
from fxsplit.ir.graph import GivenFact
from fxsplit.torch_internals.objects import VALUES, same_constant

MOST_LETTERS = 80
"""The longest text of a value in a message."""


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
    where there is none. A container is read as a tuple of what it holds. write: sets the value; None where nobody may.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None] | None = None


@dataclass(frozen=True, eq=False)
class PythonState(GivenFact):
    """The places that forward() read, each with the value that it had when the graph was captured."""

    reads: tuple[tuple[Place, Any], ...] = ()

    made_by: ClassVar[str] = "trace"

    def find_changes(self) -> dict[str, tuple[str, str]]:
        """Return the places that hold another value than when the graph was captured: name -> (then, now)."""
        # Asked before every call. Nearly always each place still holds the very same object.
        found = ((place, then, place.read()) for place, then in self.reads)
        return {p.name: describe_change(then, now) for p, then, now in found if now is not then and not same(then, now)}

    def __str__(self) -> str:
        """One line for each place that holds a number, a text or the like; objects have no text that lasts."""
        return "\n".join(f"{place.name}: {then!r}" for place, then in self.reads if is_plain(then)) or "nothing plain"


def same(then: Any, now: Any) -> bool:
    """Return whether two values of one place are the same to a graph.

    Numbers, texts and the like are compared by value, tuples item by item, all other objects by identity: what an
    `__eq__` of the user's says of two objects is not whether forward() computes the same with both.
    """
    if not isinstance(then, (tuple, frozenset)) or type(then) is not type(now):
        return same_constant(then, now) or (isinstance(then, DATES) and bool(then == now))
    if isinstance(then, frozenset):
        return then == now if is_plain(then) else set(map(id, then)) == set(map(id, now))
    return len(then) == len(now) and (all(map(is_, then, now)) or all(map(same, then, now)))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a dtype or the like, or a tuple of those, which nobody can change."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return value is ... or isinstance(value, (*VALUES, *DATES, Enum))


def describe_change(then: Any, now: Any) -> tuple[str, str]:
    """Return two values in words, that differ."""
    before, after = describe(then), describe(now)
    return before, f"another {type(now).__name__}" if before == after else after


def describe(value: Any) -> str:
    """Return a value in words, short enough for a message."""
    if value is ABSENT or is_plain(value):
        return show(value, MOST_LETTERS)
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return name
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"
