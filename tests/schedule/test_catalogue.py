"""Schedules by name, and for plans with fewer stages than there are devices."""

from __future__ import annotations

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import generate
from fxsplit.schedule.catalogue import MOST_ACTIONS, Scheduler


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
    """Three actions a stage and microbatch, and two stages a device where none are said."""
    most = MOST_ACTIONS // 12
    assert generate("1F1B", 2, 100, 1).n_microbatches == 100
    with pytest.raises(ScheduleError, match="more than 1000000: give fewer microbatches"):
        generate("1F1B", 2, most + 1)
    with pytest.raises(ScheduleError, match=f"are up to {MOST_ACTIONS + 2} actions"):
        generate("LoopedBFS", 1, (MOST_ACTIONS + 2) // 6, 2)
    with pytest.raises(ScheduleError, match="0 stages a device: give at least 1"):
        generate("LoopedBFS", 2, 2, 0)
