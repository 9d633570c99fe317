"""PipeDream and PipeDream-2BW: versions by their authors' rules, and numbers they are not made for."""

from __future__ import annotations

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import verify
from fxsplit.schedule.action import BACKWARD, FORWARD, STEP
from fxsplit.schedule.generators.asynchronous import pipedream, pipedream_2bw
from fxsplit.schedule.generators.catalogue import Scheduler


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_forward_of_pipedream_sees_the_steps_before_what_is_under_way(devices: int) -> None:
    schedule = pipedream(devices, 9)
    verify(schedule)
    for stage, row in enumerate(schedule.actions):
        for action in row:
            expected = action.microbatch + 1 if action.op == STEP else max(0, action.microbatch + 1 - devices + stage)
            assert action.version == expected, action
    assert schedule.steps == tuple(range(9)) and not schedule.synchronous
    assert schedule.peak_in_flight() == tuple(range(devices, 0, -1))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_batches_of_pipedream_2bw_use_the_version_of_the_batch_before(devices: int) -> None:
    schedule = pipedream_2bw(devices, 4 * devices)
    verify(schedule)
    for row in schedule.actions:
        for action in row:
            batch = action.microbatch // devices
            assert action.version == (batch + 1 if action.op == STEP else max(0, batch - 1)), action
    assert schedule.steps == tuple(range(devices - 1, 4 * devices, devices))
    assert {a.op for row in schedule.actions for a in row} == {FORWARD, BACKWARD, STEP}


def test_stages_a_device_are_refused_before_microbatches_are() -> None:
    """The error named 3 microbatches, which fxsplit had tried itself, although the 2 stages a device were wrong."""
    with pytest.raises(ScheduleError, match="2 stages a device; it is made for 1"):
        Scheduler("PipeDream-2BW", 2, 2).homes()


def test_numbers_they_are_not_made_for() -> None:
    for generate in (pipedream, pipedream_2bw):
        with pytest.raises(ScheduleError, match="2 stages a device; it is made for 1"):
            generate(2, 4, 2)
    with pytest.raises(ScheduleError, match=r"1 microbatches do not divide into batches of 2, .*: give 2$"):
        pipedream_2bw(2, 1)
