"""Time limits of the search."""

from __future__ import annotations

import pytest

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.planner import Planner
from tests.support.graphs import node, workload


def costs(*nodes: object, outputs: tuple[str, ...]) -> Costs:
    return Costs(nodes, (), outputs, rows=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [1e12, 1e14, 1e300])
def test_any_time_limit_will_do(seconds: float) -> None:
    """Once a long limit overflowed the number of steps that a kernel is given."""
    long = costs(*(node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(700)), outputs=("n699",))
    machine = Machine.planned(2)
    for model in ("forwarded", "direct"):
        plan = Planner(long).plan(machine, workload(machine), Options(model=model, time_limit=seconds))
        assert plan.optimal and plan.bottleneck_ms == pytest.approx(1050.0)


def test_the_work_of_kernels_is_counted_in_one_place() -> None:
    clock = SearchClock.limited(100.0)
    clock.run(lambda steps: (None, None, 7))
    clock.halve().run(lambda steps: (None, None, 5))
    assert (clock.work.tests, clock.work.steps) == (2, 12)
