"""Schedules: drawn, verified and simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit.errors import ScheduleError
from fxsplit.schedule import SCHEDULES, Action, Schedule, Times, find_schedule, generate, simulate, verify
from fxsplit.schedule.flow import with_transfers, without_transfers
from fxsplit.schedule.generators.catalogue import COUNTED, INFERENCE
from fxsplit.schedule.generators.greedy import list_schedule
from fxsplit.schedule.generators.synchronous import run_forwards_first
from fxsplit.schedule.homes import group_in_blocks, line

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
    ("LoopedBFS", 2, 2): """
0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
""",
    ("Interleaved1F1B", 2, 2): """
0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
""",
    ("ZB-H1", 2, 3): """
0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
""",
    ("ZBVZeroBubble", 2, 2): """
0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 0W0 3W1 0W1
1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
""",
    ("Chimera", 2, 2): """
0F0 1F1r1 1B1r1 0B0 0REDUCE 1REDUCEr1
0F1r1 1F0 1B0 0B1r1 0REDUCEr1 1REDUCE
""",
    ("PipeDream", 2, 4): """
0F0 0F1 0B0 0STEP0v1 0F2v1 0B1 0STEP1v2 0F3v2 0B2v1 0STEP2v3 0B3v2 0STEP3v4
1F0 1B0 1STEP0v1 1F1v1 1B1v1 1STEP1v2 1F2v2 1B2v2 1STEP2v3 1F3v3 1B3v3 1STEP3v4
""",
    ("PipeDream-2BW", 2, 4): """
0F0 0F1 0B0 0F2 0B1 0STEP1v1 0F3 0B2 0B3 0STEP3v2
1F0 1B0 1F1 1B1 1STEP1v1 1F2 1B2 1F3 1B3 1STEP3v2
""",
}


@pytest.mark.parametrize(("name", "devices", "microbatches"), list(PICTURES))
def test_drawn(name: str, devices: int, microbatches: int) -> None:
    assert str(generate(name, devices, microbatches)) == PICTURES[name, devices, microbatches].strip()


def test_actions_have_a_text() -> None:
    for text in ("0F3", "12I0", "1REDUCEr2", "3STEP5v6", "2SEND_F1", "0B5r1v2"):
        assert str(Action.parse(text)) == text
    for text in ("F3", "0X1", "0F", "0F3 ", "-1F0", "0F3q", ""):
        with pytest.raises(ScheduleError, match="is no action"):
            Action.parse(text)


def legal(name: str, devices: int, microbatches: int, per_device: int | None = None) -> Schedule | None:
    try:
        return generate(name, devices, microbatches, per_device)
    except ScheduleError:
        return None


@settings(deadline=None)  # on a busy machine an example takes long
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 13), st.sampled_from([None, 1, 2, 3]))
def test_every_schedule_is_legal_at_every_size_it_takes(
    name: str, devices: int, microbatches: int, per_device: int | None
) -> None:
    """Also with its transfers written out, which take no time of their own."""
    schedule = legal(name, devices, microbatches, per_device)
    if schedule is None:
        refusing = ("Interleaved1F1B", "InterleavedZeroBubble", "Chimera", "PipeDream-2BW")
        assert name in refusing or per_device
        return
    verify(schedule)
    written = with_transfers(schedule)
    verify(written)
    assert without_transfers(written).actions == schedule.actions
    times = Times.unit(schedule.n_stages)
    assert simulate(written, times).step_ms == simulate(schedule, times).step_ms


@settings(deadline=None)  # on a busy machine an example takes long
@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 6), st.integers(1, 9))
def test_known_peaks_and_bubble(name: str, stages: int, microbatches: int) -> None:
    """Peaks: N under GPipe, D - s under 1F1B; bubble (D-1)/(N+D-1) with F=1, B=2 under both, when N >= D."""
    schedule = generate(name, stages, microbatches)
    peaks = [microbatches if name == "GPipe" else min(microbatches, stages - s) for s in range(stages)]
    assert list(schedule.peak_in_flight()) == peaks
    found = simulate(schedule, Times.unit(stages))
    if microbatches >= stages:
        assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert found.step_ms == pytest.approx(3.0 * (microbatches + stages - 1))


@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "bubble", "peaks"),
    [
        ("GPipe", 4, 8, 0.273, [8] * 4),
        ("1F1B", 4, 8, 0.273, [4, 3, 2, 1]),
        ("Interleaved1F1B", 4, 8, 0.158, [5.5, 4.5, 3.5, 2.5]),
        ("ZB-H1", 4, 8, 0.111, [4] * 4),
        ("ZBVZeroBubble", 4, 8, 0.059, [4] * 4),
        ("1F1B", 8, 16, 0.304, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("Interleaved1F1B", 8, 16, 0.179, [11.5 - d for d in range(8)]),
        ("ZB-H1", 8, 16, 0.127, [8] * 8),
        ("ZBVZeroBubble", 8, 16, 0.068, [8] * 8),
        ("DualPipeV", 8, 20, 0.104, [8.5] * 8),
        ("Chimera", 4, 4, 0.250, [3, 4, 4, 3]),
        ("Chimera", 8, 8, 0.333, [5, 6, 8, 8, 8, 8, 6, 5]),
    ],
)
def test_published_figures(name: str, devices: int, microbatches: int, bubble: float, peaks: list[float]) -> None:
    """F=1, I=W=1, B=2, free transfers: bubbles and peaks as the schedules' authors state them."""
    schedule = generate(name, devices, microbatches)
    found = simulate(schedule, Times.unit(schedule.n_stages))
    assert round(found.bubble, 3) == bubble and list(schedule.peak_activations()) == peaks
    assert schedule.synchronous and set(schedule.weight_versions()) == {1} and set(schedule.lag()) == {0}


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
@pytest.mark.parametrize("times", [2, 3, 4])
def test_chimera_concatenates(devices: int, times: int) -> None:
    """More microbatches than devices: (D - 2) / (3 N / 2 + D - 2) idles, as its authors state; D are held at most."""
    schedule = generate("Chimera", devices, times * devices)
    assert simulate(schedule, Times.unit(devices)).bubble == pytest.approx(
        (devices - 2) / (1.5 * times * devices + devices - 2)
    )
    assert max(schedule.peak_activations()) <= devices


@pytest.mark.parametrize("devices", [2, 4, 5])
def test_weight_versions_and_lag(devices: int) -> None:
    stash = generate("PipeDream", devices, 4 * devices)
    assert stash.weight_versions() == tuple(devices - s for s in range(devices))
    assert stash.lag() == tuple(devices - 1 - s for s in range(devices))
    double = generate("PipeDream-2BW", devices, 4 * devices)
    assert double.weight_versions() == (2,) * devices and double.lag() == (1,) * devices


@settings(deadline=None)  # on a busy machine an example takes long
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 6), st.booleans())
def test_any_placement_can_be_scheduled(counts: list[int], microbatches: int, split: bool) -> None:
    """Unequal numbers of stages a device, in blocks: by list scheduling, and all forwards before all backwards."""
    homes = group_in_blocks(counts)
    rows = list_schedule(homes, microbatches, lambda a: (a.op == "F", a.microbatch), lambda d: sum(counts), split)
    for made in (rows, run_forwards_first(homes, microbatches)):
        schedule = Schedule("own", microbatches, homes, made)
        verify(schedule)
        assert simulate(schedule, Times.unit(sum(counts))).step_ms > 0
    with pytest.raises(ScheduleError, match="let devices hold more"):
        list_schedule(homes, microbatches, lambda a: a, lambda d: 0)


def test_halves_of_a_backward_take_what_is_said() -> None:
    """One microbatch through two stages: 1 + 1 forward, I1 = 3, I0 = 1; W0 = 3 ends after W1 = 1."""
    schedule = generate("ZB-H1", 2, 1)
    assert simulate(schedule, Times([1, 1], [4, 4])).step_ms == pytest.approx(2 + 2 + 2 + 2)
    assert simulate(schedule, Times([1, 1], [4, 4], weight_ms=[3, 1])).step_ms == pytest.approx(2 + 3 + 1 + 3)
    assert simulate(generate("1F1B", 2, 1), Times([1, 1], [4, 4], weight_ms=[3, 1])).step_ms == pytest.approx(10)
    with pytest.raises(ScheduleError, match="has 2 stages, and weight_ms has 1 times"):
        simulate(schedule, Times([1, 1], [4, 4], weight_ms=[3]))


def test_hops_lengthen_the_step() -> None:
    schedule = generate("GPipe", 2, 1)
    there = Times([1, 1], [2, 2], forward_hop_ms=[0, 0.5], backward_hop_ms=[0, 0.25])
    assert simulate(schedule, there).step_ms == pytest.approx(6.75)
    assert simulate(with_transfers(schedule), there).step_ms == pytest.approx(6.75)
    vee = generate("ZBVZeroBubble", 1, 1)  # both stages on one device: nothing is under way
    assert simulate(vee, there).step_ms == pytest.approx(6.0)
    with pytest.raises(ScheduleError, match="has 2 stages, and forward_ms has 3"):
        simulate(schedule, Times.unit(3))


def test_forward_only() -> None:
    assert str(generate("1F1B", 2, 2).only("F")) == "0F0 0F1\n1F0 1F1"


def changed(schedule: Schedule, *edits: tuple[int, int, str | None]) -> Schedule:
    """Return the schedule with actions (device, position) replaced, or removed if the text is None."""
    rows: list[list[Action | None]] = [list(row) for row in schedule.actions]
    for device, position, text in edits:
        if position == len(rows[device]):
            rows[device].append(None)
        rows[device][position] = Action.parse(text) if text else None
    return replace(schedule, actions=tuple(tuple(a for a in row if a is not None) for row in rows))


# GPipe 2x2: 0F0 0F1 0B0 0B1 / 1F0 1F1 1B0 1B1
ILLEGAL = [
    ("GPipe", [(1, 3, None)], "1B1 is never done"),
    ("GPipe", [(0, 4, "0F1")], "device 0, position 4, 0F1: done twice"),
    ("GPipe", [(0, 1, "0B0"), (0, 2, "0F1")], "deadlock"),
    ("GPipe", [(0, 0, "0B0"), (0, 2, "0F0")], "device 0, position 0, 0B0: comes before 0F0, which it needs"),
    ("GPipe", [(0, 3, "1B1")], "device 0, position 3, 1B1: stage 1 lives on device 1"),
    ("GPipe", [(0, 3, "2B1")], "device 0, position 3, 2B1: no such stage; there are 2"),
    ("GPipe", [(0, 3, "0B7")], "device 0, position 3, 0B7: no such microbatch; there are 2"),
    ("GPipe", [(0, 3, "0B1r1")], "device 0, position 3, 0B1r1: stage 0 has 1 replicas"),
    ("GPipe", [(0, 3, "0I1")], "0W1 is never done"),
    ("GPipe", [(0, 4, "0I1"), (0, 5, "0W1")], "0B1 is done whole, and also as I and W"),
    ("GPipe", [(0, 4, "0SEND_F0")], "is never done, and its counterpart waits"),
    ("GPipe", [(0, 4, "0SEND_B0")], "device 0, position 4, 0SEND_B0: nothing crosses between devices there"),
    ("GPipe", [(0, 3, "0B1v1")], "device 0, position 3, 0B1v1: its forward used version 0"),
    ("GPipe", [(0, 1, "0F1v1"), (0, 3, "0B1v1")], "device 0, position 1, 0F1v1: uses version 1, and the newest is 0"),
    ("GPipe", [(0, 4, "0STEP1v2")], "device 0, position 4, 0STEP1v2: makes version 2 after version 0"),
    ("1F1B", [(1, 2, "1STEP0v1"), (1, 4, "1F1"), (1, 3, "1B1")], "device 1, position 3, 1B1: comes before 1F1"),
    ("Chimera", [(0, 1, "1B1r1"), (0, 2, "1F1r1")], "device 0, position 1, 1B1r1: comes before 1F1r1"),
    ("Chimera", [(0, 2, "1B1")], "device 0, position 2, 1B1: stage 1 lives on device 1"),
    ("Chimera", [(0, 0, "0REDUCE"), (0, 4, "0F0")], "device 0, position 0, 0REDUCE: comes before 0B0"),
    ("PipeDream", [(0, 3, "0STEP0v2")], "makes version 2 after version 0"),
]


@pytest.mark.parametrize(("name", "edits", "reason"), ILLEGAL)
def test_illegal_schedules_are_refused_at_their_place(
    name: str, edits: list[tuple[int, int, str | None]], reason: str
) -> None:
    schedule = generate(name, 2, 2)
    verify(schedule)
    with pytest.raises(ScheduleError, match=reason):
        verify(changed(schedule, *edits))


def test_a_synchronous_schedule_steps_at_its_end() -> None:
    schedule = generate("GPipe", 1, 2)
    verify(changed(schedule, (0, 4, "0STEP1v1")))
    early = changed(schedule, (0, 3, "0STEP0v1"), (0, 4, "0B1"))
    with pytest.raises(ScheduleError, match="position 3, 0STEP0v1: steps before all microbatches are done"):
        verify(early)
    verify(replace(early, synchronous=False))


def test_a_deadlock_names_its_place() -> None:
    """The data flow allows each device's order; together the devices wait for each other."""
    rows = ("0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1")
    made = tuple(tuple(Action.parse(t) for t in row.split()) for row in rows)
    verify(Schedule("own", 2, line(2), made))
    crossed = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    wrong = Schedule("own", 2, line(2), tuple(tuple(Action.parse(t) for t in row.split()) for row in crossed))
    for check in (verify, lambda s: simulate(s, Times.unit(2))):
        with pytest.raises(ScheduleError, match="own: device 0, position 1, 0B0: deadlock, it waits for 1B0"):
            check(wrong)


@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "per_device", "message"),
    [
        ("Interleaved1F1B", 4, 9, None, "9 microbatches do not divide into rounds of at least 4.*give 8 or 12"),
        ("Chimera", 3, 4, None, "3 devices do not divide into two directions: give 2 or 4"),
        ("Chimera", 4, 5, None, "5 microbatches do not divide into two directions: give 4 or 6"),
        ("PipeDream-2BW", 4, 6, None, "6 microbatches do not divide into batches of 4.*give 4 or 8"),
        ("PipeDream-2BW", 4, 3, None, "give 4$"),
        ("1F1B", 4, 8, 2, "1F1B: 2 stages a device; it is made for 1: Interleaved1F1B or LoopedBFS"),
        ("ZBVZeroBubble", 4, 8, 3, "3 stages a device; it is made for 2"),
        ("V-Half", 4, 8, 1, "V-Half: 1 stages a device; it is made for 2"),
        ("V-Min", 4, 8, 4, "V-Min: 4 stages a device; it is made for 2"),
        ("DualPipeV", 4, 8, 1, "DualPipeV: 1 stages a device; it is made for 2"),
        ("GPipe", 0, 8, None, "GPipe: 0 devices: give at least 1"),
        ("GPipe", 2, 0, None, "GPipe: 0 microbatches: give at least 1"),
    ],
)
def test_numbers_that_a_schedule_is_not_made_for(
    name: str, devices: int, microbatches: int, per_device: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        generate(name, devices, microbatches, per_device)


def test_unknown_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"unknown schedule '1f1b': known are GPipe, 1F1B, .*; did you mean '1F1B'"):
        find_schedule("1f1b")


@pytest.mark.parametrize("name", sorted(set(COUNTED) - {INFERENCE}))
def test_peaks_are_those_of_the_schedule(name: str) -> None:
    for stages, microbatches in ((1, 1), (2, 5), (4, 3), (5, 8)):
        assert COUNTED[name](stages, microbatches) == tuple(generate(name, stages, microbatches).peak_in_flight())
