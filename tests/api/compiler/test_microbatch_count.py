"""The number of microbatches of a batch is decided in one place."""

from __future__ import annotations

import pytest

from fxsplit.api.compiler.microbatch_count import (
    check_microbatch_count,
    choose_microbatch_count,
    list_microbatch_counts,
)
from fxsplit.errors import InputError
from fxsplit.schedule.generators.catalogue import Scheduler


@pytest.mark.parametrize(
    ("n_devices", "rows", "count"),
    [
        (2, None, 4),  # no batch is known: two microbatches a device
        (2, 64, 4),
        (2, 16, 4),  # four rows each
        (2, 15, 3),  # smaller ones would have fewer than four rows
        (2, 8, 2),
        (4, 8, 4),  # but each device has one
        (4, 3, 3),  # and each microbatch has a row
        (1, 1, 1),
    ],
)
def test_the_batch_decides_where_nobody_else_does(n_devices: int, rows: int | None, count: int) -> None:
    assert choose_microbatch_count(n_devices, rows=rows) == count


def test_the_users_number_goes_before_a_search_and_a_search_before_the_batch() -> None:
    assert choose_microbatch_count(2, rows=64, stated=3, found=8) == 3
    assert choose_microbatch_count(2, rows=64, found=8) == 8
    assert choose_microbatch_count(2, rows=8, found=8) == 8
    assert choose_microbatch_count(2, rows=7, found=8) == 2, "the search was for a larger batch"
    assert choose_microbatch_count(2, rows=2, stated=3) == 3, "refused later, with the number of rows"


def test_only_a_number_that_nobody_stated_is_rounded_to_the_schedule() -> None:
    chimera = Scheduler("Chimera", 4)
    assert choose_microbatch_count(4, rows=20, scheduler=chimera) == chimera.nearest(5) == 4
    assert choose_microbatch_count(4, rows=20, stated=5, scheduler=chimera) == 5


def test_a_search_doubles_the_number_for_each_device() -> None:
    assert list_microbatch_counts(1000, 3) == [3, 6, 12, 24]
    assert list_microbatch_counts(6, 3) == [3, 6]
    assert list_microbatch_counts(2, 3) == [2]


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "4", None])
def test_other_than_whole_numbers_are_refused(count: object) -> None:
    with pytest.raises(InputError, match=r"n_microbatches=.*: give a number of at least 1, or nothing"):
        check_microbatch_count(count, ", or nothing")
    check_microbatch_count(1)
