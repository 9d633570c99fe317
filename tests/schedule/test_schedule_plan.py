"""A searched schedule of a plan is faster than 1F1B, fits the devices, and is the plan's own from then on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fxsplit
from fxsplit.api.plan import lay_out
from fxsplit.errors import InputError, ScheduleError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.memory.moments import count_moving
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.schedule import generate, simulate, verify
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.moments import list_moments
from fxsplit.schedule.of_plan import build_schedule, read_footprints, read_times
from fxsplit.schedule.schedule_plan import schedule_plan, search_for_plan, take_schedule
from fxsplit.schedule.simulation.memory import find_peak, trace_memory
from fxsplit.schedule.torch_csv import format_csv, parse_csv, write_csv
from tests.cli.test_plan import chain

SIZES = [40, 30, 20, 10, 20, 30, 50, 20]


def make_costs() -> Costs:
    return chain(SIZES, kept_bytes=1000, parameter_bytes=10)


def make_machine(count: int, memory_bytes: float = float("inf")) -> Machine:
    return Machine(tuple(Device(f"d{i}", memory_bytes=memory_bytes) for i in range(count)), (1e9,) * (count - 1))


def make_plan(memory_bytes: float = float("inf"), count: int = 4, n_microbatches: int = 8) -> tuple[Plan, Machine]:
    machine, workload = lay_out(make_machine(count, memory_bytes), "1F1B", n_microbatches)
    return Planner(make_costs()).plan(machine, workload, Options(use_all=True)), machine


def simulated_ms(plan: Plan, name: str) -> float:
    schedule = generate(name, len(plan.stages), plan.n_microbatches)
    return simulate(schedule, read_times(plan, schedule)).step_ms


def test_no_named_schedule_is_faster() -> None:
    plan, _ = make_plan()
    found = search_for_plan(plan, time_limit_s=60)
    verify(found.schedule)
    assert found.step_ms == simulate(found.schedule, read_times(plan, found.schedule)).step_ms
    assert found.bound_ms <= found.step_ms <= min(simulated_ms(plan, n) for n in ("GPipe", "1F1B", "ZB-H1", "ZB-H2"))
    assert found.step_ms < simulated_ms(plan, "1F1B") and found.schedule.name == SEARCH
    assert search_for_plan(plan, time_limit_s=60).schedule == found.schedule


@pytest.mark.parametrize("room", [1.0, 1.3, 2.0])
def test_it_fits_the_devices(room: float) -> None:
    free, _ = make_plan()
    # Just enough for 1F1B, and more.
    limit = room * max(stage.memory_bytes for stage in free.stages)
    plan, machine = make_plan(limit)
    found = search_for_plan(plan, [limit] * 4)
    for stage, moments in zip(plan.stages, list_moments(found.schedule), strict=True):
        assert stage.held_bytes + max(count_moving(stage, moment) for moment in moments) <= limit
    traces = trace_memory(simulate(found.schedule, read_times(plan, found.schedule)), read_footprints(plan))
    assert all(find_peak(trace) <= limit for trace in traces)
    costs, (_, workload) = make_costs(), lay_out(machine, "1F1B", 8)
    taken, scheduled = take_schedule(plan, Scheduler.of(found.schedule), costs, machine, workload)
    assert all(stage.memory_bytes <= limit for stage in taken.stages)
    assert taken.proof == plan.proof and taken.bottleneck_ms == plan.bottleneck_ms
    assert (taken.schedule, scheduled.schedule) == (found.schedule.name,) * 2
    assert scheduled.splits == bool(found.schedule.splits)


def test_less_memory_is_slower_and_kept() -> None:
    plan, _ = make_plan()
    steps = []
    for memory in (1, 2, 8):
        found = search_for_plan(plan, memory=memory)
        assert max(found.schedule.peak_activations()) <= memory
        steps.append(found.step_ms)
    assert steps[0] > steps[1] > steps[2]
    # One microbatch at a time: nothing overlaps.
    assert steps[0] == pytest.approx(8 * sum(s.forward_ms + s.backward_ms - s.weight_ms for s in plan.stages), rel=0.2)


def test_1f1b_if_no_other_schedule_is_sure_to_fit() -> None:
    plan, _ = make_plan()
    tight = [stage.held_bytes + stage.resting_bytes / 2 for stage in plan.stages]
    found = search_for_plan(plan, tight)
    assert found.schedule.actions == generate("1F1B", 4, 8).actions and found.bound_ms == 0
    assert found.gap == 1
    with pytest.raises(ScheduleError, match="memory=2 is sure to fit"):
        search_for_plan(plan, tight, memory=2)


def test_a_plan_that_states_its_schedule_replays_it() -> None:
    plan, machine = make_plan()
    found = search_for_plan(plan, memory=3)
    taken, workload = take_schedule(
        plan, Scheduler.of(found.schedule), make_costs(), machine, lay_out(machine, "1F1B", 8)[1]
    )
    again = build_schedule(taken, Scheduler(SEARCH, 4), 8)
    assert again == found.schedule == parse_csv(taken.schedule_csv, SEARCH)
    assert workload.schedule_csv == taken.schedule_csv == format_csv(found.schedule)
    # Other numbers of microbatches have no searched order.
    assert build_schedule(taken, Scheduler(SEARCH, 4), 5) == generate("1F1B", 4, 5)
    other = replace(taken, stages=taken.stages[:3])
    with pytest.raises(ScheduleError, match="search has 4 stages, and the plan 3"):
        build_schedule(other, Scheduler(SEARCH, 4), 8)


def test_plans_without_a_search() -> None:
    plan, _ = make_plan()
    with pytest.raises(ScheduleError, match=r"memory=0\.5: a device must hold one microbatch"):
        search_for_plan(plan, memory=0.5)
    shared = replace(plan, stages=(replace(plan.stages[0], devices=(0, 4)), *plan.stages[1:]))
    with pytest.raises(ScheduleError, match="replicated stages"):
        search_for_plan(shared)


def test_plan_searches() -> None:
    found = fxsplit.plan(make_costs(), make_machine(4), schedule="search", n_microbatches=8)
    assert found.schedule == SEARCH and parse_csv(found.schedule_csv, SEARCH).n_microbatches == 8
    free = fxsplit.plan(make_costs(), make_machine(4), n_microbatches=8)
    assert [s.nodes for s in found.stages] == [s.nodes for s in free.stages]


@pytest.mark.parametrize("name", ["ZB-H2", "ZBVZeroBubble", "InterleavedZeroBubble", "V-Half", "V-Min"])
def test_schedules_are_generated_from_the_times_of_the_plan(name: str) -> None:
    costs, (machine, workload) = make_costs(), lay_out(make_machine(2), name, 6)
    plan = Planner(costs).plan(machine, workload, Options(use_all=True))
    made, scheduled, found = schedule_plan(plan, costs, machine, workload)
    assert found is None
    equal = build_schedule(plan, Scheduler(name, 2), 6)
    times = read_times(plan, equal)
    from_times = generate(name, 2, 6, times=times)
    faster = simulate(from_times, times).step_ms < simulate(equal, times).step_ms
    assert build_schedule(made, Scheduler(name, 2), 6).actions == (from_times if faster else equal).actions
    assert bool(made.schedule_csv) == bool(scheduled.schedule_csv) == faster
    assert faster or name != "ZBVZeroBubble"
    # Another number of microbatches has the order for equal times.
    assert build_schedule(made, Scheduler(name, 2), 8) == generate(name, 2, 8)
    # Memory that only the order for equal times fits leaves that one.
    limits = [stage.memory_bytes for stage in plan.stages]
    if faster and any(a.memory_bytes > b for a, b in zip(made.stages, limits, strict=True)):
        tight = replace(
            machine, devices=tuple(replace(d, memory_bytes=b) for d, b in zip(machine.devices, limits, strict=True))
        )
        assert not schedule_plan(plan, costs, tight, workload)[0].schedule_csv


def test_plan_takes_schedules(tmp_path: Path) -> None:
    own = generate("ZB-H1", 4, 8)
    write_csv(own, tmp_path / "own.csv")
    stated: list[Any] = [own, tmp_path / "own.csv", str(tmp_path / "own.csv")]
    for schedule in stated:
        plan = fxsplit.plan(make_costs(), make_machine(4), schedule=schedule)
        assert parse_csv(plan.schedule_csv, own.name) == own and plan.n_microbatches == 8
    with pytest.raises(InputError, match="'ZB-H1' is for 4 devices, and there are 3"):
        fxsplit.plan(make_costs(), make_machine(3), schedule=own)
    with pytest.raises(InputError, match="n_microbatches=4: schedule 'ZB-H1' has 8"):
        fxsplit.plan(make_costs(), make_machine(4), schedule=own, n_microbatches=4)


def test_schedulers_of_schedules() -> None:
    scheduler = Scheduler.of(generate("ZB-H1", 3, 6))
    assert scheduler.nearest(4) == scheduler.nearest(9) == 6
    assert scheduler.homes() == ((0,), (1,), (2,))
    assert scheduler.in_flight(6, 3) == (3, 3, 3) and scheduler.in_flight(6, 2) == (6, 6)
    with pytest.raises(ScheduleError, match="is for 6 microbatches in 3 stages, not for 5 in 3"):
        scheduler.schedule(5)
    machine, workload = scheduler.lay_out(make_machine(3), 6)
    assert len(machine) == 3 and workload.splits and workload.schedule == "ZB-H1"
    assert workload.moments_of(3) == list_moments(generate("ZB-H1", 3, 6))
