"""Cuts: their values add up to the bytes that the plan has priced."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fxsplit
from fxsplit.ir.facts.costs.costs import Costs, InputCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options
from fxsplit.report.graph.cuts import list_cuts
from tests.report.plans import COSTS, make_plan
from tests.support.graphs import node


def test_a_cut_has_its_values_and_its_time() -> None:
    (cut,) = list_cuts(make_plan(), COSTS)
    assert [value.name for value in cut.values] == ["relu_1"]
    assert (cut.forward_bytes, cut.backward_bytes, cut.both_bytes) == (1000.0, 1000.0, 2000.0)
    assert cut.transfer_ms == pytest.approx(2.0), "2,000 bytes over 1,000 bytes per ms"
    (unknown,) = list_cuts(make_plan(), None)
    assert unknown == replace(cut, values=())


@pytest.mark.parametrize("model", ["forwarded", "direct"])
def test_values_add_up_to_what_was_priced(model: str) -> None:
    """A skip past a stage, an input that the last stage reads, and an output of the first stage."""
    nodes = (
        node("a", ["x"], 1.0, output_bytes=10.0, gradient_bytes=10.0),
        node("b", ["a"], 1.0, output_bytes=20.0, gradient_bytes=20.0),
        node("c", ["b", "a", "y"], 1.0, output_bytes=30.0, gradient_bytes=30.0),
    )
    costs = Costs(nodes, (InputCost("x", 1.0, 0.0), InputCost("y", 5.0, 0.0)), ("c", "a"), rows=1)
    plan = fxsplit.plan(costs, Machine.planned(3, bytes_per_s=1e6), options=Options(model=model))
    assert len(plan.stages) == 3
    for cut in list_cuts(plan, costs):
        if model == "forwarded":
            assert sum(value.forward_bytes for value in cut.values) == cut.forward_bytes
            assert sum(value.backward_bytes for value in cut.values) == cut.backward_bytes
        else:
            assert "y" not in {value.name for value in cut.values}
    assert {value.name for value in list_cuts(plan, costs)[1].values} >= {"a", "b"}
