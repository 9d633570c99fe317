"""Figures: which numbers are times and sizes, and how a wrong value is shown."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest

from fxsplit.system.figures import as_list, is_amount, is_count, parse_bytes, show


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
    with pytest.raises(TypeError, match="'ab' is not a list"):
        as_list("ab")


def test_wrong_values_are_shown_in_short() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert show("x") == "'x'" and len(show("x" * 1000)) < 70
    assert show(10**5000) == "a number of thousands of digits" and show(deep) == "a deeply nested value"


@pytest.mark.parametrize(
    ("text", "rate", "found"),
    [
        ("40GB", False, 40e9),
        ("1.5 GiB", False, 1.5 * 2**30),
        ("8e10", False, 8e10),
        ("7", True, 7.0),
        ("25GB/s", True, 25e9),
        ("12.5 MB/s", True, 12.5e6),
        ("inf", True, float("inf")),
    ],
)
def test_sizes_and_rates_may_have_units(text: str, rate: bool, found: float) -> None:
    assert parse_bytes(text, rate=rate) == found


@pytest.mark.parametrize(
    "text", ["", "GB", "40Gb", "40 gb", "-1GB", "40GB/s", "40GB/min", "1e5.5", "nan", "4 0GB", "1.2.3GB"]
)
def test_a_size_in_other_units_is_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="give bytes, such as 40GB; units are B, kB"):
        parse_bytes(text)


def test_a_size_that_is_too_large_is_not_taken_for_unlimited() -> None:
    """1e400 became infinity without a word, and 1e61 was refused."""
    for text in ("1e400", "1e300GB", "9e999 TB"):
        with pytest.raises(ValueError, match=r"give a number below 1e[+]60, or inf"):
            parse_bytes(text)
