"""The bound of a step is never above the shortest step over all chains, replicas and orders of work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isclose

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.ir.facts.costs.costs import Costs, InputCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner.planner import Planner
from fxsplit.planner.step.bound import LineBound, bound_by_work, sample
from fxsplit.planner.step.kernels import compile_kernels
from fxsplit.planner.step.kernels.bound import Room, add_label, bound_device, pass_stage
from fxsplit.planner.step.kernels.search import NEVER
from fxsplit.planner.step.prices import price_ideals, sort_into_levels
from tests.support.graphs import node, profiles, sweep, try_examples
from tests.support.steps import find_shortest


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels()


@st.composite
def machines(draw: st.DrawFn, most: int = 3) -> Machine:
    """Draw 1 to `most` equal devices with equal links."""
    count = draw(st.integers(1, most))
    made = Machine.planned(count, draw(st.sampled_from([float("inf"), 1e6, 1e5, 3e4])))
    late = (draw(st.sampled_from([0.0, 0.0, 0.5])),) * (count - 1)
    speed = draw(st.sampled_from([1.0, 0.5]))
    return replace(made, devices=tuple(replace(d, speed=speed) for d in made.devices), latencies_ms=late)


def bound(costs: Costs, machine: Machine, m: int, step: float, *, replicas: bool, levels: int = 0) -> float:
    chains, _ = Planner(costs).lattice(machine)
    prices = price_ideals(costs, chains, machine)
    known = sort_into_levels(prices, levels) if levels else prices
    lines = LineBound(known, len(machine), m, len(machine) if replicas else 1)
    return lines.bisect(bound_by_work(prices, len(machine), m), step)[0]


@sweep(12, 400)
@pytest.mark.parametrize("replicas", [False, True])
def test_no_plan_beats_the_bound(replicas: bool, examples: int) -> None:
    @try_examples(examples)
    @given(profiles(4), machines(), st.integers(1, 3))
    def check(costs: Costs, machine: Machine, m: int) -> None:
        best = find_shortest(costs, machine, m, replicas=replicas, most=2_000)
        # A bound that is asked for above the optimum must stay below it, too.
        for step in (best.orders, 1.3 * best.orders):
            low = bound(costs, machine, m, step, replicas=replicas)
            assert low <= best.orders * (1 + 1e-9) + 1e-9
            # Levels only lower it.
            for levels in (2, 5, 50):
                rough = bound(costs, machine, m, step, replicas=replicas, levels=levels)
                assert rough <= best.orders * (1 + 1e-9) + 1e-9 and 0.0 <= rough <= low * (1 + 3e-4) + 1e-9

    check()


def test_a_sum_that_is_no_bound_is_not_taken_for_one() -> None:
    """Weight gradients can wait: F + I of the stages before + m (F + I + W) is above the optimum."""
    nodes = (
        node("a", ["x"], 1.0, backward_ms=5.0, weight_ms=0.0),
        node("b", ["a"], 1.0, backward_ms=11.0, weight_ms=10.0),
    )
    costs = Costs(nodes, (InputCost("x", 0, 0),), ("b",), rows=1)
    machine = Machine.planned(2)
    for m, optimum in ((1, 13.0), (2, 25.0), (4, 49.0)):
        best = find_shortest(costs, machine, m, replicas=False, most=10**6)
        assert best.complete and isclose(min(best.orders, 18.0 * m), min(optimum, 18.0 * m))
        assert bound(costs, machine, m, best.orders, replicas=False) == pytest.approx(best.orders, rel=3e-4)


def test_bisection_ends_at_the_step_if_nothing_can_be_better() -> None:
    costs = Costs((node("a", ["x"], 1.0),), (InputCost("x", 0, 0),), ("a",), rows=1)
    assert bound(costs, Machine.planned(2), 4, 12.0, replicas=False) == 12.0
    # With two replicas, each takes two of four microbatches.
    assert bound(costs, Machine.planned(2), 4, 12.0, replicas=True) == pytest.approx(6.0, rel=3e-4)


@pytest.mark.parametrize("forward_ms", [0.0, 5e-324, 1e-200])
def test_bisection_ends_if_all_but_the_transfers_is_next_to_nothing(forward_ms: float) -> None:
    nodes = (node("a", ["x"], forward_ms, backward_ms=0.0), node("b", ["a"], forward_ms, backward_ms=0.0))
    costs = Costs(nodes, (InputCost("x", 0, 0),), ("b",), rows=1)
    assert bound(costs, Machine.planned(2), 1, 1.0, replicas=False) <= 2.0 * forward_ms
    assert bound(costs, Machine.planned(2), 1, 1e-320, replicas=False) <= max(2.0 * forward_ms, 1e-320)
    # The product of the bound and of this step is less than any float.
    assert bound(costs, Machine.planned(2), 1, 1e-150, replicas=False) <= max(2.0 * forward_ms, 1e-150)


def test_the_bound_is_found_before_any_line_that_fits() -> None:
    costs = Costs((node("a", ["x"], 1.0),), (InputCost("x", 0, 0),), ("a",), rows=1)
    assert bound(costs, Machine.planned(2), 4, NEVER, replicas=False) == pytest.approx(12.0, rel=3e-4)


def test_lines_of_the_labels_are_chains_from_the_empty_to_the_full_ideal() -> None:
    costs = Costs(
        tuple(node(f"n{i}", [f"n{i - 1}" if i else "x"], 1.0 + i % 2) for i in range(6)),
        (InputCost("x", 0, 0),),
        ("n5",),
        rows=1,
    )
    machine = Machine.planned(3)
    chains, _ = Planner(costs).lattice(machine)
    lines = LineBound(price_ideals(costs, chains, machine), 3, 4, 3)
    assert lines.test(60.0)
    found = lines.lines()
    assert found
    for line in found:
        assert line[0].begin == 0 and line[-1].end == len(chains) - 1
        assert all(a.end == b.begin for a, b in pairwise(line))
        assert sum(stage.replicas for stage in line) <= 3


def test_a_full_list_of_labels_merges_the_nearest() -> None:
    figures, origins = np.zeros((2, 2)), np.zeros((2, 4), np.int64)
    origin = np.array([0, 0, 0, 1])
    count = add_label(figures, origins, 0, np.array([1.0, 9.0]), origin, 0.0)
    count = add_label(figures, origins, count, np.array([9.0, 1.0]), origin, 0.0)
    # No better than a known label, and as good as another in all figures.
    assert add_label(figures, origins, count, np.array([2.0, 9.0]), origin, 0.0) == 2
    assert figures.tolist() == [[1.0, 9.0], [9.0, 1.0]]
    assert add_label(figures, origins, count, np.array([2.0, 8.0]), origin, 0.0) == 2
    assert figures.tolist() == [[1.0, 8.0], [9.0, 1.0]]
    # Better than both.
    assert add_label(figures, origins, 2, np.array([1.0, 1.0]), origin, 0.0) == 1


def test_the_interval_bound_counts_only_work_in_the_interval() -> None:
    """Two forwards of 3 ms begin at 0 and 5 ms at the earliest; 4 ms, or 1 ms, follow the end of the second."""
    samples = sample(2)
    room = Room(np.array([[0.0, 5.0]]), np.array([[4.0, 1.0]]), np.array([3.0]), np.array([0.0]))
    # At least one forward begins at 5 or later, and its end may have 1 ms after it: 5 + 3 + 1.
    assert bound_device(room, samples, 2, 1, 0.0, 1e9) == 9.0
    # Both on two replicas: half of 6 ms between 0 and 1 before the end, and 5 + 3 / 2 + 1.
    assert bound_device(room, samples, 2, 2, 0.0, 1e9) == 7.5
    assert bound_device(room, samples, 2, 1, 0.0, 8.5) > 8.5


def test_a_label_passes_a_stage_as_the_proof_says() -> None:
    samples = sample(3)
    room = Room(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(2), np.zeros(2))
    before, after = np.zeros(7), np.zeros(7)
    bound = pass_stage(before, after, samples, 3, 1, 2.0, 3.0, 1.0, 0.0, 10.0, 1e9, room)
    # Y: all forwards, and then the way of the last one; Z: input gradients, the last with its W; Q: forwards in turn.
    assert after.tolist() == [14.0, 12.0, 8.0, 4.0, 2.0, 4.0, 6.0]
    # The way of the first microbatch to the end and back, and all I and W.
    assert bound == pytest.approx(2.0 + 10.0 + 3 * 4.0)
