"""Options refuse what they do not know; one problem is posed for each number of stages that may matter."""

from __future__ import annotations

from math import inf

import pytest

from fxsplit.errors import ChainError, NoFit
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.machine import Device, Machine
from fxsplit.planner import Options, Task, antichains, bound_by_work, partition, pose_problems, sequence_states
from tests.graphs import node, workload

CHAIN = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], kept_bytes=1) for i in range(4)), (), ("n3",), rows=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer_factor": -1.0},
        {"optimizer_factor": inf},
        {"model": "sent"},
        {"time_limit": 0.0},
        {"recompute": "some"},
        {"free": True, "model": "replicated"},
    ],
)
def test_options_refuse(wrong: dict[str, object]) -> None:
    with pytest.raises(ChainError, match=r"partition\{"):
        Options(**wrong)  # type: ignore[arg-type]


def test_devices_are_interchangeable_where_nothing_tells_them_apart() -> None:
    machine = Machine.planned(2)
    unlike = Machine((Device("a"), Device("b", speed=2.0)), (inf,))
    load = workload(machine)
    assert Task(CHAIN, machine, load).interchangeable and not Task(CHAIN, unlike, load).interchangeable
    assert not Task(CHAIN, machine, load, pinned={"n0": 0}).interchangeable
    assert Task(CHAIN, unlike, load, Options(free=True), {"n0": 0}).interchangeable


@pytest.mark.parametrize(
    ("memory", "use_all", "counts"), [(inf, False, [0]), (1e9, False, [1, 2, 3]), (1e9, True, [3]), (inf, True, [0])]
)
def test_one_problem_for_each_number_of_stages(memory: float, use_all: bool, counts: list[int]) -> None:
    machine = Machine.planned(3, memory_bytes=memory)
    chains = antichains(CHAIN, 100)
    task = Task(CHAIN, machine, workload(machine), Options(use_all=use_all))
    posed = list(pose_problems(task, chains, sequence_states(CHAIN, chains)))
    assert [problem.moves.n_stages for problem in posed] == counts


def test_no_boundary_behind_a_forbidden_set() -> None:
    machine = Machine.planned(2)
    chains = antichains(CHAIN, 100)
    states = sequence_states(CHAIN, chains)
    plan = partition(Task(CHAIN, machine, workload(machine), never=(frozenset({"n0", "n1"}),)), chains, states)
    assert sorted(len(s.nodes) for s in plan.stages) == [1, 3] and plan.bottleneck_ms == 9.0


def test_work_bounds_every_plan_except_with_hosts() -> None:
    assert bound_by_work(CHAIN, Machine((Device("a"), Device("b", speed=2.0)), (inf,))) == 4.0
    assert bound_by_work(CHAIN, Machine((Device("a"), Device("h", host=True)), (inf,))) == 0.0


def test_too_many_devices_are_said() -> None:
    machine = Machine.planned(5)
    chains = antichains(CHAIN, 100)
    with pytest.raises(NoFit, match="use 4 devices or fewer"):
        partition(Task(CHAIN, machine, workload(machine)), chains, sequence_states(CHAIN, chains))
