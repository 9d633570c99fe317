"""If there is no plan, the error says which resource is missing and how much."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

import fxsplit
from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.planner.search import dense, search
from tests.support.graphs import node, workload
from tests.support.models import FAST, Mlp
from tests.support.refusals import refused


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_more_devices_than_nodes() -> None:
    costs = fxsplit.profile(Mlp(), x(), n_microbatches=1)
    with refused(
        PlanError, "a plan of 9 stages, and the graph has only 7 nodes that cuts can separate.*use 7 devices or"
    ):
        fxsplit.plan(costs, 9)


def test_memory_that_fits_no_plan() -> None:
    machine = Machine.of(["cpu", "cpu"], memory_bytes=2000)
    with refused(PlanError, r"no plan fits in memory: .* stage \d of 2 on cpu:\d \(.*\) short by .* of 2.0 KiB; use"):
        fxsplit.compile(Mlp(), machine, example_inputs=x(), passes=FAST)


def costs(*nodes: object, outputs: tuple[str, ...]) -> Costs:
    return Costs(nodes, (), outputs, rows=1)  # type: ignore[arg-type]


def test_out_of_time_is_not_no_plan() -> None:
    """Once a search without time said that no plan exists."""
    two = costs(node("a"), node("b"), outputs=("a", "b"))
    machine = Machine.planned(2)
    planner = Planner(two, pins={"b": 0})
    assert planner.plan(machine, workload(machine), Options()).bottleneck_ms == 3.0
    with pytest.raises(Exception, match=r"no plan was found within time_limit=1e-09 s: allow more time"):
        planner.plan(machine, workload(machine), Options(time_limit=1e-9))


@pytest.mark.parametrize("memory_bytes", [inf, 1e9])
def test_a_long_chain_has_a_plan_whenever_time_is_up(memory_bytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with more states than the dense solver takes had none when the limit had passed before the search."""
    chain = costs(*(node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0 + i % 3) for i in range(40)), outputs=("n39",))
    machine = Machine.planned(4, 1e6, memory_bytes)
    best = Planner(chain).plan(machine, workload(machine), Options())
    for module in (search, dense):
        monkeypatch.setattr(module, "SMALL", 10)
    hurried = Planner(chain).plan(machine, workload(machine), Options(time_limit=1e-9))
    assert len(hurried.stages) == 4 and best.bottleneck_ms <= hurried.bottleneck_ms <= 1.7 * best.bottleneck_ms
    assert hurried.lower_bound_ms <= best.bottleneck_ms


def test_memory_that_is_missing_is_told_under_direct_sends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both solvers agree: tensors have no price if only memory counts."""
    nodes = [node(f"n{i}", [f"n{i - 1}"] if i else [], kept_bytes=100, output_bytes=50) for i in range(6)]
    graph = costs(*nodes, outputs=("n5",))
    machine = Machine.planned(2, 1e3, memory_bytes=300)
    told = []
    for small in (600, 0):
        monkeypatch.setattr(search, "SMALL", small)
        with pytest.raises(Exception, match="no plan fits in memory") as error:
            Planner(graph).plan(machine, workload(machine), Options(model="direct"))
        told.append(str(error.value))
    assert told[0] == told[1]
