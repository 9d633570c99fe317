"""Stages without nodes, and what a last stage sends."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Device, Machine
from fxsplit.ir.facts.price import COST_MODELS
from fxsplit.ir.facts.workload import Workload
from fxsplit.planner import Options, Task, pose_problems
from fxsplit.planner.planner import Planner
from tests.graphs import node, workload


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


@pytest.mark.parametrize("model", COST_MODELS)
def test_tables_are_what_kernels_are_compiled_for(model: str) -> None:
    """An array of another layout would have each kernel compiled once more."""
    chain = costs(*(node(f"n{i}", [f"n{i - 1}"] if i else [], output_bytes=1) for i in range(9)), outputs=("n8",))
    machine = Machine((Device("d0", memory_bytes=1e6), Device("d1", speed=2.0), Device("d2")), (1e6, 1e6))
    chains, states = Planner(chain).lattice(machine, whole=True)
    task = Task(chain, machine, workload(machine), Options(model=model, use_all=False))
    for problem in pose_problems(task, chains, states):
        some = problem.tables.take(np.array([0, 3, 9]))
        arrays = [a for tables in (problem.tables, some) for a in tables if isinstance(a, np.ndarray)]
        assert arrays and all(a.flags.c_contiguous for a in arrays)
