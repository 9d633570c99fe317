"""Splits by hand, on four nodes of 1, 1, 1 and 3 ms."""

from __future__ import annotations

import pytest

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options, antichains, sequence_states
from fxsplit.planner.baselines import plan_baseline
from tests.support.graphs import node, workload

FOUR = [(1.0, 50), (1.0, 1), (1.0, 1), (3.0, 1)]


@pytest.mark.parametrize(
    ("name", "sizes", "load"), [("even", [2, 2], 12.0), ("parameters", [1, 3], 15.0), ("time", [3, 1], 9.0)]
)
def test_each_shares_out_its_own_figure(name: str, sizes: list[int], load: float) -> None:
    nodes = [node(f"n{i}", [f"n{i - 1}"] if i else [], ms, parameter_bytes=p) for i, (ms, p) in enumerate(FOUR)]
    costs = Costs(tuple(nodes), (), ("n3",), rows=1)
    machine = Machine.planned(2)
    chains = antichains(costs, 100)
    plan = plan_baseline(
        name, costs, chains, sequence_states(costs, chains), machine, workload(machine), Options().costs
    )
    assert plan is not None and [len(s.nodes) for s in plan.stages] == sizes and plan.bottleneck_ms == load
    assert plan.lower_bound_ms == 0.0 and not plan.optimal


def test_blocks_have_the_smallest_largest_part() -> None:
    """2, 3, 4, 1 in three parts: 2 + 3 | 4 | 1 or the like, never more than 5; cutting at equal shares gives 7."""
    nodes = [node(f"n{i}", [f"n{i - 1}"] if i else [], ms) for i, ms in enumerate([2.0, 3.0, 4.0, 1.0])]
    costs = Costs(tuple(nodes), (), ("n3",), rows=1)
    machine = Machine.planned(3)
    chains = antichains(costs, 100)
    states = sequence_states(costs, chains)
    plan = plan_baseline("block", costs, chains, states, machine, workload(machine), Options().costs)
    assert plan is not None and plan.bottleneck_ms == 15.0
    few = Machine.planned(5)
    assert plan_baseline("block", costs, chains, states, few, workload(few), Options().costs) is None
