"""The search by thresholds."""

from __future__ import annotations

from math import inf

import pytest

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.planner import Options
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.planner import Planner
from tests.support.graphs import node, workload


def costs(*nodes: object, outputs: tuple[str, ...]) -> Costs:
    return Costs(nodes, (), outputs, rows=1)  # type: ignore[arg-type]


def test_a_device_that_is_passed_over_may_be_the_better_one() -> None:
    """In the order of the machine, to have used fewer devices is no advantage: the next may be slower."""
    light = tuple(node(f"p{i}", ms=1e-9) for i in range(9))
    three = costs(*light, node("n1", ms=1), node("n2", ms=2), node("n4", ms=3), outputs=("n1",))
    machine = Machine(tuple(Device(f"d{i}", speed=s) for i, s in enumerate((1.0, 0.5, 0.5, 1.0))), (inf,) * 3)
    found = [
        Planner(three).plan(machine, workload(machine), Options(use_all=False, model=model, traffic=False))
        for model in ("forwarded", "direct")
    ]
    assert found[0].n_states > SMALL and found[1].bottleneck_ms == pytest.approx(found[0].bottleneck_ms)
