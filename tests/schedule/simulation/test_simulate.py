"""Simulations of small schedules, with times that one can add up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import Action, Schedule, Times, generate, simulate, verify
from fxsplit.schedule.flow import with_transfers
from fxsplit.schedule.homes import line


def parse_rows(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(text) for text in row.split()) for row in rows)


def spans_of(schedule: Schedule, times: Times) -> dict[str, Any]:
    """Return when each action starts and ends, by its text."""
    found = simulate(schedule, times)
    return {
        str(action): span
        for row, spans in zip(schedule.actions, found.spans, strict=True)
        for action, span in zip(row, spans, strict=True)
    }


def test_transfers_that_are_written_out_take_their_way() -> None:
    """A receive only posts; the action that uses the value waits. Each way and each boundary has its own time."""
    times = Times([1, 2, 4], [8, 16, 32], forward_hop_ms=[100, 0.5, 0.25], backward_hop_ms=[100, 0.125, 0.0625])
    found = spans_of(with_transfers(generate("1F1B", 3, 1)), times)
    assert found["0SEND_F0"] == (1, 1) and found["1RECV_F0"] == (0, 0)
    assert found["1F0"] == (1.5, 3.5) and found["2RECV_F0"] == (0, 0)
    assert found["2B0"] == (7.75, 39.75) and found["1RECV_B0"] == (3.5, 3.5)
    assert found["0RECV_B0"] == (1, 1) and found["0B0"] == (55.9375, 63.9375)
    # Without transfers in the schedule, the same values are under way as long.
    plain = spans_of(generate("1F1B", 3, 1), times)
    assert all(found[text] == span for text, span in plain.items())


def test_hosts_launch_ahead_of_their_devices() -> None:
    """Stage 0 launches F in 3 and B in 4 ms, and computes them in 1 and 2; stage 1 computes longer than it launches."""
    times = Times([1, 5], [2, 10], forward_launch_ms=[3, 1], backward_launch_ms=[4, 2])
    found = spans_of(generate("1F1B", 2, 2), times)
    # A device begins when the host does, and ends when the host has launched all of the action.
    assert found["0F0"] == (0, 3) and found["0F1"] == (3, 6)
    # Stage 1 launches F0 at 3, B0 at 4, F1 at 6 and B1 at 7: all before its device comes to them.
    assert [found[a] for a in ("1F0", "1B0", "1F1", "1B1")] == [(3, 8), (8, 18), (18, 23), (23, 33)]
    # Stage 0 can launch B0 when stage 1 has, from 6 to 10, and B1 from 10 to 14: long before the gradients are there.
    assert found["0B0"] == (18, 20) and found["0B1"] == (33, 35)


def test_a_steady_stage_takes_the_larger_of_both_sums() -> None:
    """Forwards wait for the host and backwards for the device: the step takes neither the larger time nor the sum."""
    for launches, period in (((3, 3), 9), ((7, 5), 12)):
        times = Times([1], [8], forward_launch_ms=launches[:1], backward_launch_ms=launches[1:])
        lengths = [simulate(generate("1F1B", 1, n), times).step_ms for n in (10, 20)]
        assert lengths[1] - lengths[0] == 10 * period


def test_launches_of_a_backward_in_halves() -> None:
    """Weight gradients take 2 of 6 ms, and so a third of 9 ms of launches; half if their time is unknown."""
    for backward_ms, late_ms, halves in (([6], [2], (6, 3)), ([0], [0], (4.5, 4.5))):
        times = Times([0], backward_ms, weight_ms=late_ms, backward_launch_ms=[9])
        found = spans_of(generate("ZB-H1", 1, 1), times)
        assert found["0I0"] == (0, halves[0]) and found["0W0"] == (halves[0], sum(halves))
    assert simulate(generate("1F1B", 1, 1), Times([0], [0], backward_launch_ms=[9])).step_ms == 9
    with pytest.raises(ScheduleError, match="has 1 stages, and backward_launch_ms has 2 times"):
        simulate(generate("1F1B", 1, 1), Times([0], [0], backward_launch_ms=[9, 9]))


def test_a_receive_does_not_hold_its_device_up() -> None:
    """An action between a receive and the use of its value runs meanwhile, as in torch's runtime."""
    rows = parse_rows(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )
    found = spans_of(Schedule("own", 2, line(2), rows), Times([1, 1], [2, 2], forward_hop_ms=[0, 5]))
    assert found["1F0"] == (6, 7) and found["1RECV_F1"] == (7, 7) and found["1B0"] == (7, 9)
    assert found["1F1"] == (11, 12) and found["0B0"] == (9, 11)


def test_what_two_actions_make_together_leaves_after_both() -> None:
    """1F1 and 1B0 run together, so the value of 1F1 leaves at the end of 1B0."""
    text = "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"
    rows = parse_rows(*text)
    alone = Schedule("own", 2, line(3), rows)
    pair = replace(alone, paired=frozenset({Action(1, "F", 1)}))
    verify(pair)
    times = Times([1, 1, 1], [2, 2, 2], forward_hop_ms=[0, 1, 1], backward_hop_ms=[0, 1, 1])
    for schedule in (pair, with_transfers(pair)):
        found = spans_of(schedule, times)
        assert found["1F1"] == (3, 4) and found["1B0"] == (8, 10) and found["2F1"] == (11, 12)
    assert spans_of(alone, times)["2F1"] == (7, 8)
    with pytest.raises(ScheduleError, match="position 1, 2B0: it runs together with the next action"):
        verify(replace(alone, paired=frozenset({Action(2, "B", 0)})))
    assert not alone.only("F").paired and pair.without("REDUCE").paired == pair.paired


def test_sums_and_steps_take_the_time_of_their_stage() -> None:
    times = Times([1, 1], [2, 2], reduce_ms=[10, 20], step_ms=[100, 200])
    found = spans_of(generate("Chimera", 2, 2), times)
    assert found["0REDUCE"][1] - found["0REDUCE"][0] == 10 and found["1REDUCE"][1] - found["1REDUCE"][0] == 20
    stream = spans_of(generate("PipeDream", 2, 1), times)
    assert stream["0STEP0v1"][1] - stream["0STEP0v1"][0] == 100 and stream["1STEP0v1"] == (4, 204)
    free = spans_of(generate("PipeDream", 2, 1), Times.unit(2))
    assert free["1STEP0v1"] == (4, 4)


def test_a_divided_backward_is_half_and_half_unless_it_is_said() -> None:
    found = spans_of(generate("ZB-H1", 1, 1), Times([1], [6]))
    assert found == {"0F0": (0, 1), "0I0": (1, 4), "0W0": (4, 7)}
    found = spans_of(generate("ZB-H1", 1, 1), Times([1], [6], weight_ms=[2]))
    assert found == {"0F0": (0, 1), "0I0": (1, 5), "0W0": (5, 7)}


def test_bubbles_are_shares_of_the_step() -> None:
    found = simulate(generate("GPipe", 2, 1), Times([1, 2], [3, 4]))
    assert found.step_ms == 10 and found.bubbles == pytest.approx((0.6, 0.4)) and found.bubble == pytest.approx(0.5)
    nothing = simulate(generate("GPipe", 2, 1), Times([0, 0], [0, 0]))
    assert nothing.step_ms == 0 and nothing.bubbles == (0, 0)


def test_times_of_another_number_of_stages() -> None:
    schedule = generate("GPipe", 2, 1)
    with pytest.raises(ScheduleError, match="GPipe has 2 stages, and backward_ms has 1 times"):
        simulate(schedule, Times([1, 1], [1]))
    assert simulate(schedule, Times([1, 1], [2, 2], weight_ms=[])).step_ms == 6
