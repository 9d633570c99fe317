"""Graphs with too many ideals: the bounds that minimum cuts give for all unexplored cuts."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.blocks import Blocks
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import COST_MODELS
from fxsplit.planner import Options, antichains, sequence_states
from fxsplit.planner.lattice.cuts import find_cut_levels
from fxsplit.planner.planner import Planner
from tests.planner.test_planner_models import clusters, solve
from tests.support.graphs import best_bottleneck, draw_examples, node, profiles, sweep, try_examples, workload


def works(costs: Costs, chains: Antichains) -> list[float]:
    states = sequence_states(costs, chains)
    return [float(w) for w in states.column("forward_ms") + states.column("backward_ms")]


@draw_examples(30, 120, profiles(7), st.integers(1, 9))
def test_no_ideal_of_a_level_sends_less(costs: Costs, count: int) -> None:
    blocks = Blocks.of(costs)
    levels, order = find_cut_levels(costs, blocks, count)
    chains = antichains(costs, 10_000, blocks)
    live = chains.live_bytes + chains.live_gradient_bytes
    seen = 0
    for work, bytes_ in zip(works(costs, chains), live, strict=True):
        for low, high, least in zip(levels.low, levels.high, levels.least_bytes, strict=True):
            if low <= work <= high:
                assert least <= bytes_ * (1 + 1e-12)
                seen += 1
    assert seen >= len(chains)
    assert all(order.index(a) < order.index(b) for b in range(len(blocks)) for a in blocks.before[b])
    if count == 1:  # all ideals lie in the level, and the least of them is found
        assert np.isclose(levels.least_bytes[0], live.min(), rtol=0, atol=1e-6 * max(1.0, live.max()) * len(chains))


@pytest.mark.parametrize("model", COST_MODELS)
@pytest.mark.parametrize("use_all", [True, False])
@sweep(15, 120)
def test_the_bound_holds_for_plans_that_were_not_looked_at(model: str, use_all: bool, examples: int) -> None:
    @try_examples(examples)
    @given(profiles(5), clusters(free=False))
    def check(costs: Costs, machine: Machine) -> None:
        options = Options(model=model, use_all=use_all)
        best = best_bottleneck(costs, machine, workload(machine), options)
        whole = Planner(costs, max_states=1)
        chains, _ = whole.lattice(machine, whole=True)
        plan = solve_with(whole, machine, options)
        if plan is None:
            return
        assert best is not None and plan.lower_bound_ms <= best * (1 + 1e-9) and plan.bottleneck_ms >= best * (1 - 1e-9)
        assert chains.complete or chains.levels is not None
        if plan.optimal:
            assert plan.bottleneck_ms <= best * (1 + 1e-8)

    check()


def solve_with(planner: Planner, machine: Machine, options: Options) -> Plan | None:
    try:
        return planner.plan(machine, workload(machine), options)
    except PlanError:
        return None


def test_traffic_that_no_cut_avoids_is_in_the_bound() -> None:
    """If every cut of a chain sends for as long as four nodes run, the bound exceeds the work by itself."""
    costs = Costs(
        tuple(node(f"n{i}", [f"n{i - 1}"] if i else (), 1.0 + i % 3, output_bytes=12e3) for i in range(64)),
        (),
        ("n63",),
    )
    machine = Machine.planned(4, 1e6)
    exact = solve(costs, machine, Options())
    planner = Planner(costs, max_states=1)
    rough = planner.plan(machine, workload(machine), Options())
    assert planner.lattice(machine)[0].levels is not None and exact is not None and exact.optimal
    assert rough.lower_bound_ms <= exact.bottleneck_ms == pytest.approx(rough.bottleneck_ms)
    assert rough.gap < 0.05 and rough.lower_bound_ms > 1.15 * costs.total_ms / 4


def test_memory_may_bind_where_ideals_are_too_many() -> None:
    """The order along light cuts is planned under the same memory as any other."""
    branches = [node(f"b{i}", ["n0"], 1.0, parameter_bytes=100, output_bytes=1) for i in range(12)]
    end = node("end", [b.name for b in branches], 1.0)
    costs = Costs((node("n0", (), 1.0, output_bytes=1), *branches, end), (), ("end",))
    plan = Planner(costs, max_states=100).plan(
        Machine.planned(4, inf, memory_bytes=3 * 5 * 100 + 100), workload(Machine.planned(4)), Options()
    )
    assert plan.n_states == 15 and [sum(n.startswith("b") for n in s.nodes) for s in plan.stages] == [3, 3, 3, 3]
