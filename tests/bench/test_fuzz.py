"""The fuzzers run, and find nothing in a few cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from bench.fuzz import Outcome, checkpoints, files, models, planner

HAD_A_BOUND_ABOVE_THE_OPTIMUM = (1013787, 1017033, 1017227, 1019776, 2018881)
"""Seeds of cases with few states in which only the last devices used to be tried as idle devices."""


def list_faults(try_case: Callable[[int], Outcome], seeds: Iterable[int]) -> list[str]:
    """Return the faults that the cases of these seeds found, each with its seed."""
    found = []
    for seed in seeds:
        try:
            fault = try_case(seed).fault
        except Exception as error:
            error.add_note(f"in the case of seed {seed}")
            raise
        found += [f"seed {seed}: {fault}"] if fault is not None else []
    return found


def test_files() -> None:
    assert list_faults(files.try_case, range(40)) == []


def test_checkpoints() -> None:
    assert list_faults(checkpoints.try_case, range(40)) == []


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.long)], ids=str)
def test_plans(seeds: range) -> None:
    assert list_faults(planner.try_case, seeds) == []


def test_plans_whose_bound_was_above_the_optimum() -> None:
    assert list_faults(planner.try_case, HAD_A_BOUND_ABOVE_THE_OPTIMUM) == []


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 12), marks=pytest.mark.long)], ids=str)
def test_models(seeds: range) -> None:
    assert list_faults(models.try_case, seeds) == []
