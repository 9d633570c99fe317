"""The fuzzers run, and find nothing in a few cases."""

from __future__ import annotations

import pytest

from bench.fuzz import checkpoints, files, models, planner


@pytest.mark.parametrize("seed", range(40))
def test_files(seed: int) -> None:
    assert files.try_case(seed).fault is None


@pytest.mark.parametrize("seed", range(100))
def test_checkpoints(seed: int) -> None:
    assert checkpoints.try_case(seed).fault is None


# The last five had a lower bound above the optimum: few states, and only the last devices were tried to be left idle.
@pytest.mark.parametrize("seed", [*range(100), 1013787, 1017033, 1017227, 1019776, 2018881])
def test_plans(seed: int) -> None:
    assert planner.try_case(seed).fault is None


@pytest.mark.parametrize("seed", range(12))
def test_models(seed: int) -> None:
    assert models.try_case(seed).fault is None
