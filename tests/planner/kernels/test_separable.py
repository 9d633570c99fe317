"""The separable kernels on a chain of three nodes and two devices, small enough to count its chains by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import pytest

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options, Task, pose_problems
from fxsplit.planner.kernels.separable import reach, reach_bounded
from fxsplit.planner.kernels.tables import Tables
from fxsplit.planner.planner import Planner
from tests.support.graphs import node, workload

PLENTY = 10**6


def tables(memory: float = inf) -> Tables:
    """Three nodes of 3, 6 and 9 ms, that hold 1, 2 and 3 bytes of parameters; the states are 0, 1, 2 and 3 nodes."""
    costs = Costs(
        (
            node("a", parameter_bytes=1),
            node("b", ["a"], 2.0, parameter_bytes=2),
            node("c", ["b"], 3.0, parameter_bytes=3),
        ),
        (),
        ("c",),
        rows=1,
    )
    machine = Machine.planned(2, memory_bytes=memory)
    chains, states = Planner(costs).lattice(machine, whole=True)
    options = Options(optimizer_factor=0.0)
    (problem,) = pose_problems(Task(costs, machine, workload(machine), options), chains, states)
    return problem.tables


@pytest.mark.parametrize("kernel", [reach, reach_bounded])
def test_a_chain_exists_from_the_best_load_upwards(kernel: Callable[..., Any]) -> None:
    """Two stages take (3, 15) or (9, 9) ms, so 9 ms is the best load."""
    origin, via, _ = kernel(tables(), 8.9, PLENTY)
    assert (origin[-1, 3], via[-1, 3]) == (-1, -1)
    origin, via, _ = kernel(tables(), 9.0, PLENTY)
    last = int(via[-1, 3])
    assert origin[-1, 3] == 2 and origin[tables().moves[last, 0], 2] == 0


def test_a_stage_that_does_not_fit_is_no_stage() -> None:
    """A stage holds its parameters and the sums of their gradients: twice the bytes of its parameters."""
    assert tables(memory=100.0).space_end[0, 3] == 12.0
    # The stages (a, b) and (c) hold 6 bytes each, and every other split holds more in one of them.
    assert reach_bounded(tables(memory=6.0), 50.0, PLENTY)[0][-1, 3] == 2
    assert reach_bounded(tables(memory=5.0), 50.0, PLENTY)[0][-1, 3] == -1


@pytest.mark.parametrize("kernel", [reach, reach_bounded])
def test_a_kernel_that_runs_out_of_steps_says_so(kernel: Callable[..., Any]) -> None:
    assert kernel(tables(), 9.0, 2)[2] > 2


def test_tables_of_some_states() -> None:
    whole = tables()
    some = whole.take(np.array([0, 2, 3]))
    assert some.work.tolist() == [0.0, 9.0, 18.0] and some.end.shape[1] == 3
    assert some.start.flags.c_contiguous and some.allowed.flags.c_contiguous and some.moves is whole.moves


def test_long_lists_stay_inside_of_their_arrays() -> None:
    """Without working memory the arrays did not grow, and compiled code wrote past their end."""
    names = [f"n{i}" for i in range(20)]
    nodes = [node(n, names[max(i - 1, 0) : i], output_bytes=10 * (i + 1)) for i, n in enumerate(names)]
    # A later start has less to do and more to receive, so no start beats another.
    costs = Costs(tuple(nodes), (), (names[-1],), rows=1)
    machine = Machine.planned(2, memory_bytes=10_000)
    chains, states = Planner(costs).lattice(machine, whole=True)
    (problem,) = pose_problems(Task(costs, machine, workload(machine), Options()), chains, states)
    assert not problem.tables.needs.freed.size
    origin, _, _ = reach_bounded(problem.tables, 60.0, PLENTY)
    assert origin[-1, 20] >= 0
