"""Schedules: drawn, checked and simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import ScheduleError
from fxsplit.schedule import PEAKS, SCHEDULES, Action, Schedule, find_schedule, simulate

PICTURES = {
    ("GPipe", 2, 3): """
0F0 0F1 0F2 0B0 0B1 0B2
1F0 1F1 1F2 1B0 1B1 1B2
""",
    ("1F1B", 3, 4): """
0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
""",
    ("1F1B", 3, 1): """
0F0 0B0
1F0 1B0
2F0 2B0
""",
}


@pytest.mark.parametrize(("name", "stages", "microbatches"), list(PICTURES))
def test_drawn(name: str, stages: int, microbatches: int) -> None:
    assert str(SCHEDULES[name](stages, microbatches)) == PICTURES[name, stages, microbatches].strip()


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 9))
def test_legal_at_every_size_with_known_peaks_and_bubble(name: str, stages: int, microbatches: int) -> None:
    """Peaks: N under GPipe, D - s under 1F1B; bubble (D-1)/(N+D-1) with F=1, B=2 under both, when N >= D."""
    schedule = SCHEDULES[name](stages, microbatches)
    schedule.check()
    peaks = [microbatches if name == "GPipe" else min(microbatches, stages - s) for s in range(stages)]
    assert list(schedule.peak_in_flight()) == peaks
    found = simulate(schedule, [1.0] * stages, [2.0] * stages)
    if microbatches >= stages:
        assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert found.step_ms == pytest.approx(3.0 * (microbatches + stages - 1))


def test_figures_of_four_devices_and_eight_microbatches() -> None:
    for name in SCHEDULES:
        found = simulate(SCHEDULES[name](4, 8), [1.0] * 4, [2.0] * 4)
        assert round(found.bubble, 3) == 0.273


def test_hops_lengthen_the_step() -> None:
    schedule = SCHEDULES["GPipe"](2, 1)
    assert simulate(schedule, [1, 1], [2, 2], [0.5]).step_ms == pytest.approx(7.0)


def test_forward_only() -> None:
    assert str(SCHEDULES["1F1B"](2, 2).only("F")) == "0F0 0F1\n1F0 1F1"


def rows(schedule: Schedule) -> list[list[Action]]:
    return [list(row) for row in schedule.actions]


def broken(schedule: Schedule, changed: list[list[Action]]) -> Schedule:
    return replace(schedule, actions=tuple(tuple(row) for row in changed))


def test_illegal_schedules_are_refused_at_their_place() -> None:
    legal = SCHEDULES["1F1B"](2, 2)
    missing = rows(legal)
    missing[1].pop()
    doubled = rows(legal)
    doubled[0].append(Action(0, "F", 1))
    early = rows(legal)
    early[0].insert(0, early[0].pop())
    lost = rows(legal)
    lost[0].append(lost[1].pop())
    for changed, reason in (
        (missing, "1B1 is never done"),
        (doubled, "device 0, position 4, 0F1: done twice"),
        (early, "device 0, position 0, 0B1: backward before its forward"),
        (lost, "device 0, position 4, 1B1: stage 1 lives on device 1"),
    ):
        with pytest.raises(ScheduleError, match=reason):
            broken(legal, changed).check()
    stuck = rows(SCHEDULES["GPipe"](2, 2))
    stuck[0] = [stuck[0][0], stuck[0][2], stuck[0][1], stuck[0][3]]
    with pytest.raises(ScheduleError, match="deadlocks: device 0, position 1, 0B0"):
        simulate(broken(SCHEDULES["GPipe"](2, 2), stuck), [1, 1], [2, 2])


def test_unknown_schedule() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule '1f1b': known are GPipe, 1F1B; did you mean '1F1B'"):
        find_schedule("1f1b")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_peaks_are_those_of_the_schedule(name: str) -> None:
    for stages, microbatches in ((1, 1), (2, 5), (4, 3), (5, 8)):
        assert PEAKS[name](stages, microbatches) == tuple(SCHEDULES[name](stages, microbatches).peak_in_flight())
