"""The order pass by itself: the sums of each ideal, by hand."""

from __future__ import annotations

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.states import States
from fxsplit.passes.order import Order
from fxsplit.planner import antichains
from tests.support.graphs import ir_of, node


def test_every_ideal_sums_what_it_holds() -> None:
    costs = Costs((node("a", ms=1.0), node("b", ["a"], 2.0), node("c", ["a"], 4.0)), (), ("b", "c"), rows=1)
    states = Order()(ir_of(costs, antichains(costs, 100)))[States]
    # The ideals are {}, {a}, {a, b}, {a, c} and {a, b, c}; a backward takes twice the time of its forward.
    assert sorted(states.column("forward_ms")) == [0.0, 1.0, 3.0, 5.0, 7.0]
    assert list(states.column("backward_ms")) == [2 * ms for ms in states.column("forward_ms")]
