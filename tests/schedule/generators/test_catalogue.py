"""Schedules by name, and for plans with fewer stages than devices."""

from __future__ import annotations

from math import inf

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.schedule import generate
from fxsplit.schedule.generators.catalogue import (
    ASYNCHRONOUS,
    COUNTED,
    INFERENCE,
    MOST_ACTIONS,
    SCHEDULES,
    SEARCH,
    Scheduler,
)


def test_fewer_stages_than_devices() -> None:
    scheduler = Scheduler("1F1B", 4)
    assert scheduler.schedule(6, 3) == generate("1F1B", 3, 6) and scheduler.schedule(6) == generate("1F1B", 4, 6)
    assert scheduler.in_flight(6, 3) == (3, 2, 1) and scheduler.versions(6, 3) == (1, 1, 1)
    assert Scheduler("PipeDream", 4).versions(8, 2) == (2, 1)
    with pytest.raises(ScheduleError, match="has 4 stages, and the plan 5"):
        scheduler.schedule(6, 5)
    with pytest.raises(ScheduleError, match="has 4 stages, and the plan 3"):
        Scheduler("LoopedBFS", 2).schedule(6, 3)


def test_a_plan_that_could_not_run_holds_all_microbatches() -> None:
    scheduler = Scheduler("LoopedBFS", 2)
    assert scheduler.in_flight(6, 3) == (6, 6, 6) and scheduler.versions(6, 3) == (1, 1, 1)


def test_the_nearest_number_of_microbatches() -> None:
    assert Scheduler("PipeDream-2BW", 4).nearest(9) == 8 and Scheduler("PipeDream-2BW", 4).nearest(8) == 8
    assert Scheduler("Chimera", 2).nearest(1) == 2, "none is smaller, so the next one"
    with pytest.raises(ScheduleError):
        Scheduler("Chimera", 3).nearest(4)


def test_homes_do_not_depend_on_the_number_of_microbatches() -> None:
    assert Scheduler("ZBVZeroBubble", 2).homes() == ((0,), (1,), (1,), (0,))
    assert Scheduler("1F1B", 4).homes(2) == ((0,), (1,))


def test_schedules_without_end_are_refused() -> None:
    """Three actions for each stage and microbatch, and two stages a device by default."""
    most = MOST_ACTIONS // 12
    assert generate("1F1B", 2, 100, 1).n_microbatches == 100
    with pytest.raises(ScheduleError, match="more than 1000000: give fewer microbatches"):
        generate("1F1B", 2, most + 1)
    with pytest.raises(ScheduleError, match=f"are up to {MOST_ACTIONS + 2} actions"):
        generate("LoopedBFS", 1, (MOST_ACTIONS + 2) // 6, 2)
    with pytest.raises(ScheduleError, match="0 stages a device: give at least 1"):
        generate("LoopedBFS", 2, 2, 0)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_in_flight_is_what_the_schedule_holds(name: str) -> None:
    """By a formula or not, for every number of stages that the schedule is made for."""
    for devices, count in ((2, 4), (4, 8), (4, 4), (6, 12)):
        scheduler = Scheduler(name, devices)
        made = generate(name, devices, count)
        assert scheduler.in_flight(count, made.n_stages) == made.peak_in_flight()
        assert scheduler.versions(count, made.n_stages) == made.weight_versions()
        assert scheduler.homes() == made.homes


def test_a_plan_that_cannot_run_counts_as_holding_everything() -> None:
    assert Scheduler("Interleaved1F1B", 2).in_flight(4, 3) == (4, 4, 4)
    assert Scheduler("1F1B", 2).in_flight(4, 3) == (4, 4, 4)
    assert Scheduler("1F1B", 2, stages_per_device=2).in_flight(4, 2) == (4, 4)


def test_lay_out_has_a_device_for_each_stage() -> None:
    machine, workload = Scheduler("Interleaved1F1B", 2).lay_out(Machine.planned(2, 1e6, 100.0), 4, may_idle=True)
    assert [(d.name, d.memory_bytes) for d in machine.devices] == [
        ("device0/0", 50.0),
        ("device1/0", 50.0),
        ("device0/1", 50.0),
        ("device1/1", 50.0),
    ]
    assert workload.may_idle and sorted(workload.in_flight) == [1, 2, 3, 4] and not workload.versions
    alike, _ = Scheduler("1F1B", 2).lay_out(Machine.planned(2), 4)
    assert alike == Machine.planned(2) and alike.links == (inf,)
    _, stepping = Scheduler("PipeDream", 3).lay_out(Machine.planned(3), 4)
    assert stepping.versions[3] == (3, 2, 1) and "PipeDream" in ASYNCHRONOUS


def test_wrong_numbers_are_refused_before_planning() -> None:
    with pytest.raises(ScheduleError, match="do not divide"):
        Scheduler("Interleaved1F1B", 4).lay_out(Machine.planned(4), 9)
    assert Scheduler("Interleaved1F1B", 4).nearest(9) == 8 and Scheduler("Chimera", 4).nearest(1) == 2


def test_formulas_reach_where_lists_are_too_long() -> None:
    """512 devices have a schedule of more than a million actions, and can be planned for."""
    _, workload = Scheduler("1F1B", 512).lay_out(Machine.planned(512), 1024)
    assert set(COUNTED) == {"GPipe", "1F1B", "ZB-H1", "ZB-H2", SEARCH, INFERENCE} and workload.in_flight[512][:2] == (
        512,
        511,
    )
