"""Figures: which numbers are times and sizes, and how a wrong value is shown."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest

from fxsplit.ir.facts.figures import as_list, is_amount, is_count, show


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 1, 1e59, 10**18, np.float64(2), np.int64(3), 5e-324])
def test_amounts(value: Any) -> None:
    assert is_amount(value)


@pytest.mark.parametrize("value", [-1, 1e60, 10**400, inf, nan, True, None, "1", [], np.bool_(True), 1j])
def test_no_amounts(value: Any) -> None:
    assert not is_amount(value)


def test_counts_and_lists() -> None:
    assert is_count(0) and is_count(2**53 - 1) and is_count(1, least=1)
    assert not any(map(is_count, (-1, 2**53, 1.0, True, "1", None))) and not is_count(0, least=1)
    assert as_list([1, "a"]) == (1, "a")
    with pytest.raises(TypeError, match="'ab' stands where a list belongs"):
        as_list("ab")


def test_wrong_values_are_shown_in_short() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert show("x") == "'x'" and len(show("x" * 1000)) < 70
    assert show(10**5000) == "a number of thousands of digits" and show(deep) == "a deeply nested value"
