"""Policies: each follows its rule, and greedy growth misses what the exact policy finds."""

from __future__ import annotations

from fxsplit.allocation.job import Job
from fxsplit.allocation.policies import POLICIES

FLAT, STEEP, PAIR = Job("flat", [3.0, 3.5, 4.0]), Job("steep", [1.0, 1.0, 9.0]), Job("pair", [0.0, 2.0, 3.0], least=2)
JOBS = [FLAT, STEEP, PAIR]


def test_each_policy_follows_its_rule() -> None:
    def choose(policy: str, n_devices: int) -> list[int]:
        return list(POLICIES[policy](JOBS, [0, 0, 0], n_devices, 10.0))

    assert choose("equal", 5) == [2, 2, 0]  # the third job needs two
    assert choose("equal", 20) == [3, 3, 3]
    assert choose("first-come", 5) == [3, 2, 0]
    assert choose("first-come", 6) == [3, 3, 0]
    # The second device of the steep job brings nothing, so that greedy growth never gives it the third.
    assert choose("greedy", 4) == [1, 1, 2]
    assert choose("exact", 4) == [1, 3, 0]


def test_greedy_growth_stops_if_no_step_gains() -> None:
    dear = Job("dear", [1.0, 1.1], up_s=60.0)
    assert list(POLICIES["greedy"]([dear], [1], 2, 10.0)) == [1]
