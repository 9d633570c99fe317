"""The costs of kinds of moves, from the figures of a state."""

from __future__ import annotations

from math import inf

import numpy as np

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


def test_replicas_are_another_kind_than_one_device_as_fast() -> None:
    """They compute as fast together, and each launches half of the microbatches."""
    chain = Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1)
    machine = Machine((Device("slow", speed=0.5), Device("too", speed=0.5), Device("fast")), (inf, inf))
    chains, states = Planner(chain).lattice(machine)
    options = Options(model="replicated", use_all=False)
    (problem,) = pose_problems(Task(chain, machine, workload(machine), options), chains, states)
    of_devices = {m.devices: k for m, k in zip(problem.moves.moves, problem.kind, strict=True) if not m.first}
    assert of_devices[(2,)] != {m.devices: k for m, k in zip(problem.moves.moves, problem.kind, strict=True)}[(0, 1)]
