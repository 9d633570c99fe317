"""The bytes that stages share under direct sends: each computation agrees with the definition."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import HealthCheck, given, settings

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options, Task, antichains, pose_problems, sequence_states
from fxsplit.planner.direct.kernels import cheapest_above
from fxsplit.planner.direct.problem import DirectProblem
from fxsplit.planner.search.dense import first_order
from tests.support.graphs import profiles, workload

MACHINE = Machine.planned(2, 1e3)
few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def pose(costs: Costs, use_all: bool = True) -> DirectProblem:
    chains = antichains(costs, 10**4)
    options = Options(model="direct", use_all=use_all)
    task = Task(costs, MACHINE, workload(MACHINE), options)
    problem = next(pose_problems(task, chains, sequence_states(costs, chains)))
    assert isinstance(problem, DirectProblem)
    return problem


@few
@given(profiles(6))
def test_shared_bytes_are_those_of_the_definition(costs: Costs) -> None:
    problem = pose(costs)
    sets = [set(problem.chains.names(i)) for i in range(len(problem))]
    line = np.array(first_order(problem.chains))
    for states in (np.arange(len(problem)), line):
        shared, _ = problem.shared(states)
        for (i, a), (j, b) in itertools.product(enumerate(states), repeat=2):
            stage = sets[b] - sets[a]
            if sets[a] <= sets[b]:
                paid = sum(size for size, pins in costs.tensors if 0 < len(set(pins) & stage) < len(set(pins)))
                assert np.isclose(shared[i, j], paid)
    live = [sum(size for size, pins in costs.tensors if 0 < len(set(pins) & s) < len(set(pins))) for s in sets]
    assert np.allclose(problem.live, live)


def test_the_cheapest_ideal_above() -> None:
    """Ideals 0 -> 1 -> 3 and 0 -> 2 -> 3."""
    pointer, child = np.array([0, 2, 3, 4, 4], np.int32), np.array([1, 2, 3, 3], np.int32)
    assert cheapest_above(pointer, child, np.array([[5.0, 2.0, 9.0, 4.0]])).tolist() == [[2.0, 2.0, 4.0, 4.0]]


@few
@given(profiles(5))
def test_fewer_devices_are_better_only_where_a_plan_may_stop_early(costs: Costs) -> None:
    assert not pose(costs).better.any()
    assert pose(costs, use_all=False).better.tolist() == [[False, True, True], [False, False, True], [False] * 3]
