"""The partition pass by itself: the only even cut of a chain."""

from __future__ import annotations

from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.passes.order import Order
from fxsplit.passes.partition import Partition
from fxsplit.planner import antichains
from tests.graphs import ir_of, node, workload


def test_a_chain_is_cut_where_both_stages_take_as_long() -> None:
    costs = Costs((node("a", ms=1.0), node("b", ["a"], 2.0), node("c", ["b"], 3.0)), (), ("c",), rows=1)
    machine = Machine.planned(2)
    ir = Order()(ir_of(costs, antichains(costs, 100), machine, workload(machine)))
    plan = Partition()(ir)[Plan]
    # 1 + 2 ms forward on one device and 3 ms on the other, and twice that backward.
    assert [s.nodes for s in plan.stages] == [("a", "b"), ("c",)] and plan.bottleneck_ms == 9.0 and plan.optimal
