"""Options refuse unknown values; one problem is posed for each number of stages that may matter."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import Any

import pytest

import fxsplit
from fxsplit.errors import ChainError, NoFit, PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.costs.forwards import keep_forwards
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.planner import (
    Options,
    Task,
    antichains,
    bound_by_work,
    no_plan,
    partition,
    pose_problems,
    sequence_states,
    solve,
)
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.direct.problem import DirectProblem
from fxsplit.planner.planner import Planner
from fxsplit.planner.problem.problem import Path, Problem
from fxsplit.planner.search import search
from fxsplit.planner.search.search import BestChain
from fxsplit.schedule.generators.catalogue import Scheduler
from tests.support.graphs import node, workload

CHAIN = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], kept_bytes=1) for i in range(4)), (), ("n3",), rows=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer_factor": -1.0},
        {"optimizer_factor": inf},
        {"model": "sent"},
        {"time_limit": 0.0},
        {"traffic": "no"},
        {"free": 1},
        {"model": ["direct"]},
        {"recompute": ["auto"]},
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
    # Launching takes as long on a fast device: 40 ms on two hosts.
    launched = replace(CHAIN, nodes=tuple(replace(n, backward_launch_ms=40.0 / len(CHAIN.nodes)) for n in CHAIN.nodes))
    assert bound_by_work(launched, Machine((Device("a"), Device("b", speed=2.0)), (inf,))) == pytest.approx(20.0)


def test_too_many_devices_are_said() -> None:
    machine = Machine.planned(5)
    chains = antichains(CHAIN, 100)
    with pytest.raises(NoFit, match="use 4 devices or fewer"):
        partition(Task(CHAIN, machine, workload(machine)), chains, sequence_states(CHAIN, chains))


def test_a_slow_device_in_front_may_stay_idle() -> None:
    """Only the last devices could: the plan took 200 ms and was called optimal."""
    costs = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], ms=2 / 3) for i in range(4)), (), ("n3",))
    machine = Machine((Device("slow", speed=0.01), Device("fast")), (inf,))
    found = fxsplit.plan(costs, machine, options=Options(use_all=False))
    assert [s.devices for s in found.stages] == [(1,)]
    assert found.bottleneck_ms == pytest.approx(8.0) and found.optimal


def test_a_small_device_in_front_may_stay_idle() -> None:
    """It was said that no plan fits, though one fits on the other devices."""
    costs = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], buffer_bytes=10) for i in range(4)), (), ("n3",))
    machine = Machine(
        (Device("a", memory_bytes=5), Device("b", memory_bytes=20), Device("c", memory_bytes=25)), (inf, inf)
    )
    found = fxsplit.plan(costs, machine, options=Options(use_all=False))
    assert [s.devices for s in found.stages] == [(1,), (2,)] and found.optimal


def test_a_pin_leaves_the_devices_before_it_idle() -> None:
    """A pin to the second device required a stage on the first one, even if none was needed."""
    costs = Costs((node("a"),), (), ("a",))
    found = fxsplit.plan(costs, 3, pins={"a": 1}, options=Options(use_all=False))
    assert [s.devices for s in found.stages] == [(1,)]


@pytest.mark.parametrize("memory_bytes", [inf, 60.0])
def test_where_it_takes_too_long_only_the_last_devices_idle(
    memory_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan then has a gap to the best of all, and no proof."""
    costs = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else [], buffer_bytes=10) for i in range(4)), (), ("n3",))
    machine = Machine((Device("slow", memory_bytes=memory_bytes, speed=0.01), Device("fast")), (inf,))
    best = fxsplit.plan(costs, machine, options=Options(use_all=False))
    for name in ("MOST_CELLS", "MOST_BOUNDED"):
        monkeypatch.setattr(f"fxsplit.planner.solve.{name}", 0)
    found = fxsplit.plan(costs, machine, options=Options(use_all=False))
    assert found.stages[0].devices == (0,) and not found.optimal
    assert found.lower_bound_ms <= best.bottleneck_ms < found.bottleneck_ms


@pytest.mark.parametrize("recompute", ["auto", "always"])
def test_without_backwards_no_stage_recomputes(recompute: str) -> None:
    """Once the planner charged for a second forward, which inference never runs."""
    machine = Machine.planned(2)
    laid_out = Scheduler("Inference", 2).lay_out(machine, 4)
    plans = [Planner(keep_forwards(CHAIN)).plan(*laid_out, Options(recompute=way)) for way in (recompute, "never")]
    assert plans[0].stages == plans[1].stages and plans[0].bottleneck_ms == 2.0


def unequal(memory_bytes: float, count: int = 4) -> Machine:
    """Return devices of one size, joined by a fast and a slow link in turn."""
    devices = tuple(Device(f"d{i}", memory_bytes=memory_bytes) for i in range(count))
    return Machine(devices, tuple(1e6 if i % 2 else 1e9 for i in range(count - 1)))


def count_searches(monkeypatch: pytest.MonkeyPatch, task: Task) -> tuple[list[int], float]:
    """Return the number of stages of each problem that planning searches, 0 for all at once, and the bottleneck."""
    searched: list[int] = []

    def minimise_and_note(problem: Problem, *args: Any, **kwargs: Any) -> BestChain | None:
        searched.append(problem.moves.n_stages)
        return search.minimise(problem, *args, **kwargs)

    monkeypatch.setattr(solve, "minimise", minimise_and_note)
    chains = antichains(task.costs, 100)
    return searched, partition(task, chains, sequence_states(task.costs, chains)).bottleneck_ms


LONG = Costs(
    tuple(
        node(f"n{i}", [f"n{i - 1}"] if i else [], kept_bytes=10, parameter_bytes=200 if i < 2 else 50) for i in range(8)
    ),
    (),
    ("n7",),
    rows=1,
)


def test_one_search_is_enough_if_the_best_plan_without_limits_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = unequal(1e9)
    searched, _ = count_searches(monkeypatch, Task(LONG, machine, workload(machine), Options(use_all=False)))
    assert searched == [0]


def test_numbers_of_stages_near_the_best_plan_without_limits_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = unequal(inf)
    task = Task(LONG, roomy, workload(roomy), Options(use_all=False))
    _, free_ms = count_searches(monkeypatch, task)
    chains = antichains(LONG, 100)
    free = partition(task, chains, sequence_states(LONG, chains))
    # The best plan without limits is short of a byte, and only that.
    tight = unequal(max(stage.memory_bytes for stage in free.stages) - 1)
    searched, bound_ms = count_searches(monkeypatch, replace(task, machine=tight))
    assert searched[:2] == [0, len(free.stages)] and sorted(searched) == [0, 1, 2, 3, 4] and bound_ms >= free_ms


def test_why_nothing_fits_is_asked_only_if_a_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning tries joined nodes first, and all nodes if that fails."""
    asked: list[object] = []

    def explain_and_note(*args: Any, **kwargs: Any) -> PlanError:
        asked.append(args)
        return no_plan.explain_misfit(*args, **kwargs)

    monkeypatch.setattr(solve, "explain_misfit", explain_and_note)
    machine = unequal(100)
    with pytest.raises(NoFit, match="no plan fits in memory"):
        Planner(LONG).plan(machine, workload(machine), Options(use_all=False))
    assert len(asked) == 1


def test_that_nothing_fits_follows_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared bytes of stages were computed for each number of stages, and again for the explanation."""
    monkeypatch.setattr(search, "SMALL", 0)
    tested: list[Problem] = []
    own = DirectProblem.test

    def test_and_note(problem: DirectProblem, *args: Any, **kwargs: Any) -> Path | None:
        tested.append(problem)
        return own(problem, *args, **kwargs)

    monkeypatch.setattr(DirectProblem, "test", test_and_note)
    options = Options(use_all=False, model="direct")
    tight, roomy = unequal(100), unequal(900)
    with pytest.raises(NoFit, match="short by 730 B"):
        Planner(LONG).plan(tight, workload(tight), options)
    assert not tested
    assert Planner(LONG).plan(roomy, workload(roomy), options).stages and tested


def test_half_of_the_time_goes_to_the_search_without_limits() -> None:
    begin = time.monotonic()
    half = SearchClock(begin + 100.0).halve().deadline
    # On a busy machine some of the time has gone by when it is halved.
    assert begin + 50.0 <= half <= begin + 50.0 + time.monotonic() - begin
    assert SearchClock().halve().deadline == inf
