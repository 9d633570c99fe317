"""Python values: which are the same, how a message describes a change, and how a dump shows them."""

from __future__ import annotations

import enum
import math
from datetime import datetime
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fxsplit.ir.facts.capture.python_state import ABSENT, Place, PythonState, describe, describe_change, is_plain, same


class Kind(enum.Enum):
    A = 1


class Equal:
    """Says that it is equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def method(self) -> None:
        """Do nothing."""


ONE = Equal()
SAME: list[tuple[Any, Any]] = [
    (1.5, float("1.5")),
    (math.nan, float("nan")),
    ((1, (2.0, "a")), (1, (2.0, "a"))),
    (torch.device("cpu"), torch.device("cpu")),
    (torch.Size([2, 3]), torch.Size([2, 3])),
    (Fraction(1, 3), Fraction(1, 3)),
    (np.float32(2), np.float32(2)),
    (frozenset({1, 2}), frozenset({2, 1})),
    (frozenset({"a", 8, 0}), frozenset({0, 8, "a"})),
    (datetime(2026, 1, 1), datetime(2026, 1, 1)),
    (np.float32("nan"), np.float32("nan")),
    (ONE.method, ONE.method),
    ((ONE,), (ONE,)),
]
OTHER: list[tuple[Any, Any]] = [
    (0.0, -0.0),
    (1, True),
    (1, 1.0),
    (Equal(), Equal()),
    ((Equal(),), (Equal(),)),
    ((1,), (1, 2)),
    (ONE.method, Equal().method),
    (torch.ones(2), torch.ones(2)),
    (ABSENT, None),
    (np.float32(2), np.float64(2)),
]


@pytest.mark.parametrize(("then", "now"), SAME)
def test_the_same(then: Any, now: Any) -> None:
    assert same(then, now)


@pytest.mark.parametrize(("then", "now"), OTHER)
def test_not_the_same(then: Any, now: Any) -> None:
    """An object that is equal by its own `__eq__` used to pass for the captured object."""
    assert not same(then, now)


def test_what_nobody_can_change_is_plain() -> None:
    assert all(map(is_plain, (None, 1, "a", Kind.A, torch.float32, torch.device("cpu"), (1, "a"), ..., range(3))))
    assert not any(map(is_plain, ([1], {}, ONE, (1, [2]), torch.ones(1), np.ones(1), object(), Equal, print, iter(()))))


def test_values_in_words() -> None:
    assert describe(ABSENT) == "nothing" and describe(Equal) == "Equal" and describe(ONE) == "an Equal"
    assert describe("a" * 100) == "'" + "a" * 79 + "..." and describe(torch.relu).endswith("relu")
    assert describe_change(1, 2) == ("1", "2") and describe_change(ONE, Equal()) == ("an Equal", "another Equal")


def test_changes_are_found_by_place() -> None:
    held: dict[str, Any] = {"rate": 1.0, "cfg": ONE}
    places = [Place(f"attribute {name!r}", lambda name=name: held.get(name, ABSENT)) for name in held]  # type: ignore[misc]
    state = PythonState(tuple((place, place.read()) for place in places))
    assert state.find_changes() == {} and str(state) == "attribute 'rate': 1.0"
    held["rate"] = 2.0
    del held["cfg"]
    assert state.find_changes() == {"attribute 'rate'": ("1.0", "2.0"), "attribute 'cfg'": ("an Equal", "nothing")}
    assert str(PythonState()) == "nothing plain"
