"""Stages without nodes, and what a last stage sends."""

from __future__ import annotations

from math import inf

import pytest

from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Device, Machine
from fxsplit.ir.facts.price import COST_MODELS
from fxsplit.ir.facts.workload import Workload
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from tests.graphs import node


def costs(*nodes: object, outputs: tuple[str, ...]) -> Costs:
    return Costs(nodes, (), outputs, rows=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", COST_MODELS)
def test_stages_may_be_empty_under_every_model(model: str) -> None:
    """Once the search under direct sends knew no stages without nodes."""
    long = costs(*(node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(700)), outputs=("n699",))
    machine = Machine((Device("d0", speed=1e-4), Device("d1")), (inf,))
    idle = Workload("1F1B", 3, {1: (3,), 2: (2, 1)}, may_idle=True)
    assert Planner(long).plan(machine, idle, Options(model=model)).bottleneck_ms == pytest.approx(2100.0)


@pytest.mark.parametrize("model", ["forwarded", "overlapped", "direct"])
def test_the_last_stage_in_use_sends_nothing_on(model: str) -> None:
    """Once the last stage paid for sending its output to devices that are not in use."""
    one = costs(node("a", output_bytes=1e6, gradient_bytes=1e6), outputs=("a",))
    machine = Machine.planned(2, 1e4)
    idle = Workload("1F1B", 3, {1: (3,), 2: (2, 1)}, may_idle=True)
    plan = Planner(one).plan(machine, idle, Options(model=model, use_all=False))
    assert plan.bottleneck_ms == 3.0 and len(plan.stages) == 1
