"""The fuzzers run, and find nothing in a few cases."""

from __future__ import annotations

import pytest

from bench.fuzz import files, planner


@pytest.mark.parametrize("seed", range(40))
def test_files(seed: int) -> None:
    assert files.try_case(seed).fault is None


@pytest.mark.parametrize("seed", range(100))
def test_plans(seed: int) -> None:
    assert planner.try_case(seed).fault is None
