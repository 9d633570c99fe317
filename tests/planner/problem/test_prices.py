"""The costs of kinds of moves, from the figures of a state."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.planner import Options, Task, pose_problems
from fxsplit.planner.planner import Planner
from fxsplit.planner.problem.prices import price_launches
from tests.support.graphs import node, workload


def test_launches_by_kind_of_move() -> None:
    """Two nodes are launched in 1 + 2 and 4 + 8 ms: whole, again forward, shared by two replicas, and by no host."""
    nodes = (
        node("a", forward_launch_ms=1, backward_launch_ms=2),
        node("b", ["a"], forward_launch_ms=4, backward_launch_ms=8),
    )
    _, states = Planner(Costs(nodes, (), ("b",), rows=1)).lattice(Machine.planned(2))
    kinds = {"recompute": [0, 1, 0, 0], "replicas": [1, 1, 2, 1], "host": [0, 0, 0, 1]}
    columns = {name: np.array(values, np.float64)[:, None] for name, values in kinds.items()}
    assert price_launches(states, columns).tolist() == [[0, 3, 15], [0, 4, 20], [0, 1.5, 7.5], [0, 0, 0]]
    _, silent = Planner(Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1)).lattice(Machine.planned(2))
    assert price_launches(silent, columns).shape == (0, 0)


@pytest.mark.parametrize(("model", "load_ms"), [("forwarded", (9.0, 11.0)), ("overlapped", (3.0, 5.0))])
def test_each_message_costs_its_latency(model: str, load_ms: tuple[float, float]) -> None:
    """A value and a gradient of 500 bytes cross at 1 byte a us, in 1 ms together; each is 2.5 ms late."""
    two = (
        node("a", ms=1.0, output_bytes=500, gradient_bytes=500),
        node("b", ["a"], ms=3.0, output_bytes=500, gradient_bytes=500),
    )
    machine = replace(Machine.planned(2, bytes_per_s=1e6), latencies_ms=(2.5,))
    two = replace(two[0], backward_ms=2.0), replace(two[1], backward_ms=2.0)
    costs = Costs(two, (), ("b",), rows=1)
    plan = Planner(costs).plan(machine, workload(machine), Options(model=model))
    assert tuple(stage.load_ms for stage in plan.stages) == load_ms and plan.optimal
    assert [stage.in_latency_ms for stage in plan.stages] == [0.0, 2.5]


def test_what_does_not_cross_has_no_latency() -> None:
    """Only values cross in a graph without gradients, and nothing between two halves that share nothing."""
    machine = replace(Machine.planned(2, bytes_per_s=1e6), latencies_ms=(4.0,))
    for reads, transfer_ms in (["a"], 4.5), ([], 0.0):
        nodes = node("a", ms=8.0, output_bytes=500 * len(reads)), node("b", reads, ms=8.0, output_bytes=500)
        plan = Planner(Costs(nodes, (), ("b",), rows=1)).plan(machine, workload(machine), Options())
        assert [stage.transfer_ms for stage in plan.stages] == [transfer_ms] * 2 and plan.optimal
        assert plan.stages[1].in_latency_ms == (4.0 if reads else 0.0)


def test_no_cut_with_fewer_messages_is_lost() -> None:
    """A node without cost makes the first gradient. A cut before it sends as many bytes, and one message less."""
    first = node("u", ms=5.0, output_bytes=100)
    nodes = first, node("v", ["u"], ms=0.0, output_bytes=50, gradient_bytes=50), node("w", ["v"], ms=5.0)
    machine = replace(Machine.planned(2, bytes_per_s=1e6), latencies_ms=(3.0,))
    plan = Planner(Costs(nodes, (), ("w",), rows=1)).plan(machine, workload(machine), Options())
    assert [stage.nodes for stage in plan.stages] == [("u",), ("v", "w")] and plan.optimal
    assert plan.bottleneck_ms == pytest.approx(15.0 + 0.1 + 3.0)


def test_overlapped_loads_do_not_block() -> None:
    machine = replace(Machine.planned(2), transfers="blocking")
    chain = Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1)
    with pytest.raises(PlanError, match="transfers='blocking': use the cost model forwarded"):
        Planner(chain).plan(machine, workload(machine), Options(model="overlapped"))
    assert Planner(chain).plan(machine, workload(machine), Options()).transfers == "blocking"


def test_a_late_link_is_not_cut() -> None:
    """Three devices with equal bandwidths: only the second link is late, and the plan leaves the last device idle."""
    nodes = tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], ms=2.0, output_bytes=1) for i in range(6))
    machine = replace(Machine.planned(3, bytes_per_s=1e9), latencies_ms=(0.0, 9.0))
    planner = Planner(Costs(nodes, (), ("n5",), rows=1))
    plan = planner.plan(machine, workload(machine), Options(use_all=False))
    assert [stage.devices for stage in plan.stages] == [(0,), (1,)] and plan.optimal
    assert len(planner.plan(Machine.planned(3), workload(machine), Options(use_all=False)).stages) == 3


def test_replicas_are_another_kind_than_one_device_as_fast() -> None:
    """They compute as fast together, and each launches half of the microbatches."""
    chain = Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1)
    machine = Machine((Device("slow", speed=0.5), Device("too", speed=0.5), Device("fast")), (inf, inf))
    chains, states = Planner(chain).lattice(machine)
    options = Options(model="replicated", use_all=False)
    (problem,) = pose_problems(Task(chain, machine, workload(machine), options), chains, states)
    of_devices = {m.devices: k for m, k in zip(problem.moves.moves, problem.kind, strict=True) if not m.first}
    assert of_devices[(2,)] != {m.devices: k for m, k in zip(problem.moves.moves, problem.kind, strict=True)}[(0, 1)]
