"""The bound of plans with two stages a device is never above the shortest step over all chains and orders of work."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.ir.facts.costs.costs import Costs, InputCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner.planner import Planner
from fxsplit.planner.step import two_stages
from fxsplit.planner.step.kernels import compile_kernels
from fxsplit.planner.step.prices import price_ideals, sort_into_levels
from fxsplit.planner.step.two_stages import PLACEMENTS, Chain, ChainBound, list_rows
from fxsplit.schedule.generators.catalogue import generate
from fxsplit.schedule.simulation.simulate import Times, simulate
from fxsplit.schedule.solver.search import Placement, place_stages, search
from tests.planner.step.test_bound import machines
from tests.support.graphs import node, profiles, sweep, try_examples
from tests.support.steps import find_shortest_chain


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_kernels()


def chain(*ms: float, output_bytes: int = 0) -> Costs:
    """A chain of nodes that take so many ms forward."""
    nodes = tuple(
        node(f"n{i}", [f"n{i - 1}" if i else "x"], each, output_bytes=output_bytes, gradient_bytes=output_bytes)
        for i, each in enumerate(ms)
    )
    return Costs(nodes, (InputCost("x", 0, 0),), (f"n{len(ms) - 1}",), rows=1)


def prepare(costs: Costs, machine: Machine, m: int, levels: int = 0) -> ChainBound:
    """Return the bound of a graph, by levels if a number of them is given."""
    prices = price_ideals(costs, Planner(costs).lattice(machine)[0], machine)
    return ChainBound(sort_into_levels(prices, levels) if levels else prices, len(machine), m)


def bound(costs: Costs, machine: Machine, m: int, goal: float) -> float:
    """Return the bound of the pairs."""
    found = prepare(costs, machine, m)
    low = found.bound_by_sums(goal)
    while found.raise_lowest(goal):
        pass
    assert low <= found.least(goal) * (1 + 1e-9)
    return found.least(goal)


@sweep(8, 400)
def test_no_chain_beats_the_bound(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(4), machines(), st.integers(1, 3))
    def check(costs: Costs, machine: Machine, m: int) -> None:
        best = find_shortest_chain(costs, machine, m)
        if best.orders in (0.0, inf):
            return
        # A bound that is asked for above the optimum must stay below it, too.
        for goal in (best.orders, 1.3 * best.orders):
            low = bound(costs, machine, m, goal)
            assert low <= best.orders * (1 + 1e-9) + 1e-9
            # Levels only lower the bound of the sums.
            for levels in (2, 5, 50):
                assert prepare(costs, machine, m, levels).bound_by_sums(goal) <= best.orders * (1 + 1e-9) + 1e-9

    check()


def test_equal_stages_have_a_tight_bound() -> None:
    """A V of eight equal stages on four devices: the search finds an order that the bound proves."""
    costs, machine = chain(*[1.0] * 8), Machine.planned(4)
    times = Times([1.0] * 8, [2.0] * 8, weight_ms=[1.0] * 8)
    found = search(times, n_devices=4, n_microbatches=4, stages_per_device=2, placement="v")
    assert bound(costs, machine, 4, found.step_ms) >= 0.98 * found.step_ms


def test_graphs_with_fewer_nodes_than_stages_have_no_chain() -> None:
    for nodes in (1, 2, 3):
        assert bound(chain(*[1.0] * nodes), Machine.planned(4), 4, 100.0) == 100.0
    assert bound(chain(*[1.0] * 4), Machine.planned(4), 4, 100.0) < 100.0


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("k", [2, 3])
def test_no_order_beats_the_sums_of_one_chain(placement: Placement, k: int) -> None:
    rng = np.random.default_rng(k)
    names = ("ZBVZeroBubble", "V-Min") if placement == "v" else ("LoopedBFS", "InterleavedZeroBubble")
    for m in (1, k, 2 * k):
        for _ in range(4):
            forward, input_, weight = rng.uniform(0.0, 3.0, (3, 2 * k)) * (rng.random((3, 2 * k)) < 0.8)
            times = Times(forward.tolist(), (input_ + weight).tolist(), weight_ms=weight.tolist())
            steps = [simulate(generate(name, k, m, None, times), times).step_ms for name in names]
            found = search(
                times, n_devices=k, n_microbatches=m, stages_per_device=2, placement=placement, time_limit_s=0.02
            )
            low = (list_rows(placement, k, m) * np.stack([forward, input_, weight])).sum(axis=(1, 2))
            assert low.max() <= min(*steps, found.step_ms) * (1 + 1e-9)


def test_the_sums_of_a_v_and_a_loop_count_what_their_devices_do() -> None:
    # Two devices and 3 microbatches. Device 0 has stages 0 and 3 in a V: all its work, and nothing before it.
    assert list_rows("v", 2, 3)[0].tolist() == [[3, 0, 0, 3]] * 3
    # Before its second stage begins, it has F of stage 0 only.
    assert list_rows("v", 2, 3)[1].tolist() == [[1, 1, 1, 3], [3, 0, 0, 3], [3, 0, 0, 3]]
    # In a loop it has stages 0 and 2.
    assert list_rows("loop", 2, 3)[1].tolist() == [[1, 1, 3, 0], [3, 0, 3, 0], [3, 0, 3, 0]]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_chains_that_a_test_meets_are_chains_of_stages(placement: Placement) -> None:
    costs, machine = chain(1.0, 2.0, 1.0, 3.0, 1.0, 2.0, output_bytes=1000), Machine.planned(2, 1e6)
    found = prepare(costs, machine, 4)
    found.bound_by_sums(1e3)
    met = found.test((placement, 2), 200.0)
    assert met
    for each in met:
        assert each.placement == placement and each.homes == place_stages(2, 2, placement)
        assert each.ends[-1] == found.between.value.size - 1
        assert all(found.between.allowed[a, b] for a, b in pairwise([0, *each.ends]))
        assert found.bound_chain(each) <= 200.0 * (1 + 1e-9)
    assert found.test((placement, 2), 10.0) is None


def test_nothing_is_sent_between_the_two_stages_of_the_last_device_of_a_v() -> None:
    costs, machine = chain(1.0, 1.0, 1.0, 1.0, output_bytes=1000), Machine.planned(2, 1e6)
    found, ends = prepare(costs, machine, 4), (1, 2, 3, 4)
    assert found.price(Chain("v", ends)).tolist() == [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0], [1.0] * 4]
    assert found.price(Chain("loop", ends))[0].tolist() == [2.0, 3.0, 3.0, 2.0]


def test_a_stage_that_half_of_a_device_cannot_hold_is_left_out() -> None:
    nodes = tuple(node(f"n{i}", [f"n{i - 1}" if i else "x"], parameter_bytes=10**6) for i in range(4))
    costs = Costs(nodes, (InputCost("x", 0, 0),), ("n3",), rows=1)
    for memory, fits in ((7.9e6, False), (8.1e6, True)):
        found = prepare(costs, Machine.planned(2, memory_bytes=memory), 2)
        assert found.between.allowed.any() == fits
        assert (found.bound_by_sums(100.0) < 100.0) == fits


def test_tables_of_too_many_ideals_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_stages, "MOST_PAIRED", 3)
    found = prepare(chain(*[1.0] * 6), Machine.planned(2), 4)
    low = found.bound_by_sums(100.0)
    assert not found.raise_lowest(100.0) and found.least(100.0) == found.prove(100.0) == low


def test_the_bound_reaches_a_step_that_no_chain_beats() -> None:
    costs, machine = chain(*[1.0] * 4), Machine.planned(2)
    found = prepare(costs, machine, 2)
    step = find_shortest_chain(costs, machine, 2, most=10**6).orders
    found.bound_by_sums(step)
    while found.raise_lowest(step):
        pass
    assert found.prove(step) == step
