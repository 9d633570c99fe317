"""PythonState: the Python values that forward() read while it was captured, and whether they have changed since.

A graph holds operators on tensors. `forward()` also reads Python values, such as `self.scale`, a global, or a setting
of torch, and the graph keeps what was computed with them. So such a value is compared before every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar, Final

from fxsplit.ir.graph import GivenFact

MOST_LETTERS = 80
"""The longest text of a value in a message."""


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
    if then is now:
        return True
    if type(then) is not type(now):
        return False
    if isinstance(then, MethodType):
        return then.__func__ is now.__func__ and then.__self__ is now.__self__
    if isinstance(then, (tuple, frozenset)):
        if len(then) != len(now):
            return False
        return all(map(is_, then, now)) or all(map(same, then, now))
    # repr() tells 0.0 from -0.0, and takes NaN for NaN.
    return repr(then) == repr(now) if isinstance(then, (float, complex)) else is_plain(then) and bool(then == now)


_COMPARED = ("datetime", "decimal", "fractions", "numpy", "pathlib", "torch", "uuid")
"""The modules of types that compare by value as their users expect."""
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, MethodType)


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a dtype or the like, or a tuple of those, which nobody can change."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, range, Enum)) or value is ...:
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    if isinstance(value, _BY_IDENTITY) or type(value).__module__.partition(".")[0] not in _COMPARED:
        return False
    # Only what can be a key of a dict never changes. A tensor can be one, but compares by its values.
    return type(value).__hash__ is not None and not hasattr(value, "__dict__") and not hasattr(value, "__next__")


def describe_change(then: Any, now: Any) -> tuple[str, str]:
    """Return two values in words, that differ."""
    before, after = describe(then), describe(now)
    return before, f"another {type(now).__name__}" if before == after else after


def describe(value: Any) -> str:
    """Return a value in words, short enough for a message."""
    if value is ABSENT or is_plain(value):
        text = repr(value)
        return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return name
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"
