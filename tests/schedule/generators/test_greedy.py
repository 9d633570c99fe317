"""List scheduling: the choice of a device among several actions that it could start."""

from __future__ import annotations

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import Schedule
from fxsplit.schedule.generators.greedy import Rows, list_schedule
from fxsplit.schedule.homes import line


def text(rows: Rows) -> str:
    return "\n".join(" ".join(str(action) for action in row) for row in rows)


def test_the_order_decides_among_what_can_start() -> None:
    """On one device everything can start as soon as it is there."""
    forwards_first = list_schedule(line(1), 3, lambda a: (a.op != "F", a.microbatch), lambda device: 9)
    assert text(forwards_first) == "0F0 0F1 0F2 0B0 0B1 0B2"
    backwards_first = list_schedule(line(1), 3, lambda a: (a.op == "F", a.microbatch), lambda device: 9)
    assert text(backwards_first) == "0F0 0B0 0F1 0B1 0F2 0B2"
    last_first = list_schedule(line(1), 3, lambda a: (a.op != "F", -a.microbatch), lambda device: 9)
    assert text(last_first) == "0F2 0F1 0F0 0B2 0B1 0B0"


def test_a_device_waits_for_nothing_while_it_could_start_something() -> None:
    """Device 0 has no gradient before time 4 (F0, F0, B0 of two units), so it goes on with forwards until then."""
    rows = list_schedule(line(2), 4, lambda a: (a.op == "F", a.microbatch), lambda device: 9)
    assert text(rows) == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"


def test_a_device_holds_no_more_than_it_may() -> None:
    """With two microbatches at most on device 0 and one on device 1 it is 1F1B."""
    rows = list_schedule(line(2), 4, lambda a: (a.op == "F", a.microbatch), lambda device: 2 - device)
    assert text(rows) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    schedule = Schedule("own", 4, line(2), rows)
    assert schedule.peak_in_flight() == (2, 1)
    with pytest.raises(ScheduleError, match="no device can go on"):
        list_schedule(line(2), 4, lambda a: a, lambda device: device)


def test_a_divided_backward_frees_at_its_weight_gradient() -> None:
    """With room for one microbatch, the next forward waits for W; with more, I and F come first."""
    order = {"F": 1, "I": 0, "W": 2}
    tight = list_schedule(line(1), 2, lambda a: (order[a.op], a.microbatch), lambda device: 1, split=True)
    assert text(tight) == "0F0 0I0 0W0 0F1 0I1 0W1"
    loose = list_schedule(line(1), 2, lambda a: (order[a.op], a.microbatch), lambda device: 9, split=True)
    assert text(loose) == "0F0 0I0 0F1 0I1 0W0 0W1"
    both = list_schedule(line(2), 1, lambda a: a, lambda device: 9, split=True)
    assert text(both) == "0F0 0I0 0W0\n1F0 1I0 1W0"


def test_replicas_take_microbatches_in_turn_and_twice_as_long() -> None:
    """Stage 1 on devices 1 and 2: a forward takes two units there, so two devices are as fast as stage 0's one."""
    rows = list_schedule(((0,), (1, 2)), 4, lambda a: (a.op != "F", a.microbatch), lambda device: 9)
    assert text(rows[1:]) == "1F0 1F2 1B0 1B2\n1F1r1 1F3r1 1B1r1 1B3r1"
    alone = list_schedule(((0,), (0, 1)), 2, lambda a: (a.op == "F", a.stage, a.microbatch), lambda device: 9)
    assert text(alone) == "0F0 0F1 1F0 1B0 0B0 0B1\n1F1r1 1B1r1"
