"""Stages without nodes, and the sends of a last stage."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.price import COST_MODELS
from fxsplit.planner import Options, Task, pose_problems
from fxsplit.planner.planner import Planner
from fxsplit.planner.search import search
from tests.support.graphs import node, workload


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


def launching(*launches: float) -> Costs:
    """A chain of nodes that compute for 3 ms each, and are launched forward and backward within the ms given."""
    return costs(
        *(
            node(
                f"n{i}",
                [f"n{i - 1}"] if i else [],
                kept_bytes=1,
                forward_launch_ms=ms / 4,
                backward_launch_ms=3 * ms / 4,
            )
            for i, ms in enumerate(launches)
        ),
        outputs=(f"n{len(launches) - 1}",),
    )


@pytest.mark.parametrize("small", [600, 0])
@pytest.mark.parametrize("memory", [inf, 8.0])
@pytest.mark.parametrize("model", COST_MODELS)
def test_a_stage_takes_as_long_as_its_host_launches(
    model: str, memory: float, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By computing time both chains would be cut elsewhere, and one host would have to launch for 16 ms."""
    monkeypatch.setattr(search, "SMALL", small)
    machine, options = Machine.planned(2, memory_bytes=memory), Options(model=model)
    plan = Planner(launching(8.0, 8.0, 0.0, 0.0, 0.0, 0.0)).plan(machine, workload(machine), options)
    if model == "replicated":
        # Each of two replicas launches, and computes, half of the microbatches.
        assert plan.optimal and plan.bottleneck_ms == 9.0 and [s.launch_ms for s in plan.stages] == [8.0]
    else:
        assert plan.optimal and plan.bottleneck_ms == 15.0 and [s.launch_ms for s in plan.stages] == [8.0, 8.0]
    machine = Machine.planned(3, memory_bytes=memory)
    plan = Planner(launching(0.0, 8.0, 8.0, 0.0)).plan(machine, workload(machine), options)
    assert plan.optimal and plan.bottleneck_ms == pytest.approx(16 / 3 if model == "replicated" else 8.0)


@pytest.mark.parametrize("memory", [inf, 1e3])
@pytest.mark.parametrize("turned", [False, True])
def test_a_start_with_more_left_to_compute_may_leave_less_to_launch(turned: bool, memory: float) -> None:
    """Of two branches, one computes for 4 ms, and the other for 3, but is launched for 6: it makes the first stage.

    A search that kept only the start that leaves the least to compute would miss that plan.
    """
    figures = {"kept_bytes": 1.0, "backward_ms": 0.0}
    branches = [
        node("computes", [], 4.0, **figures),
        node("launches", [], 3.0, forward_launch_ms=6.0, **figures),
    ]
    last = node("last", ["computes", "launches"], 2.0, forward_launch_ms=6.0, **figures)
    graph = costs(*(branches[::-1] if turned else branches), last, outputs=("last",))
    machine = Machine.planned(2, memory_bytes=memory)
    chains, states = Planner(graph).lattice(machine)
    (problem,) = pose_problems(Task(graph, machine, workload(machine)), chains, states)
    path = problem.test(6.0)
    assert path is not None and chains.names(path[0][0]) == ["launches"] and problem.loads(path) == [6.0, 6.0]
    assert problem.test(5.9) is None


@pytest.mark.parametrize("model", COST_MODELS)
def test_launches_bound_every_plan(model: str) -> None:
    """The bound is 16 ms on two hosts, or the larger node by itself."""
    machine = Machine.planned(2)
    for chain, least in (
        (launching(4.0, 4.0, 4.0, 4.0), 8.0),
        (launching(1.0, 14.0, 1.0), 14.0 if model != "replicated" else 8.0),
    ):
        chains, states = Planner(chain).lattice(machine)
        task = Task(chain, machine, workload(machine), Options(model=model))
        assert [problem.lower_bound() for problem in pose_problems(task, chains, states)] == [least]
    host = Machine((Device("d0"), Device("h", host=True)), (inf,))
    task = Task(chain, host, workload(host), Options(model=model))
    assert all(p.lower_bound() < 14.0 for p in pose_problems(task, *Planner(chain).lattice(host))), (
        "a host launches nothing"
    )


@pytest.mark.parametrize("model", COST_MODELS)
def test_tables_are_what_kernels_are_compiled_for(model: str) -> None:
    """An array of another layout would have each kernel compiled once more."""
    chain = costs(*(node(f"n{i}", [f"n{i - 1}"] if i else [], output_bytes=1) for i in range(9)), outputs=("n8",))
    machine = Machine((Device("d0", memory_bytes=1e6), Device("d1", speed=2.0), Device("d2")), (1e6, 1e6))
    for profile in (chain, launching(*range(9))):
        chains, states = Planner(profile).lattice(machine, whole=True)
        task = Task(profile, machine, workload(machine), Options(model=model, use_all=False))
        for problem in pose_problems(task, chains, states):
            some = problem.tables.take(np.array([0, 3, 9]))
            arrays = [a for tables in (problem.tables, some) for a in tables if isinstance(a, np.ndarray)]
            assert arrays and all(a.flags.c_contiguous for a in arrays)
            assert {a.dtype for a in (problem.tables.launch, some.launch)} == {np.dtype(np.float64)}
