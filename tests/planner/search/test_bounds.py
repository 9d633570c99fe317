"""Lower bounds: true whatever order of the nodes was looked at."""

from __future__ import annotations

from math import inf

import pytest

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.price import COST_MODELS
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from tests.support.graphs import best_bottleneck, node, workload


def costs(*nodes: object, outputs: tuple[str, ...]) -> Costs:
    return Costs(nodes, (), outputs, rows=1)  # type: ignore[arg-type]


def test_a_number_of_stages_that_does_not_fit_on_one_order_is_not_ruled_out() -> None:
    """Two stages fit only in the order that was not looked at: the bound must leave room for them."""
    two = costs(node("a", kept_bytes=2000), node("b", kept_bytes=100), outputs=("a", "b"))
    machine = Machine((Device("d0", memory_bytes=2500), Device("d1")), (inf,))
    plan = Planner(two, max_states=1).plan(machine, workload(machine), Options(use_all=False))
    assert plan.lower_bound_ms <= 3.0 and (plan.bottleneck_ms == 3.0 or not plan.optimal)


@pytest.mark.parametrize("model", COST_MODELS)
def test_bounds_of_one_order_know_hosts(model: str) -> None:
    """Once the bound failed with a host, whose speed it takes as infinite."""
    two = costs(node("b", host_ms=0.1), node("a", host_ms=9.0), outputs=("a", "b"))
    machine = Machine((Device("d0"), Device("h", host=True)), (1e6,))
    options = Options(use_all=False, model=model)
    best = best_bottleneck(two, machine, workload(machine), options)
    plan = Planner(two, max_states=1).plan(machine, workload(machine), options)
    assert best is not None and plan.lower_bound_ms <= best * (1 + 1e-9)
