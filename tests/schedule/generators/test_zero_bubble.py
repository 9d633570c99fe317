"""Zero-bubble schedules beside torch's own, and beside what can be reached at all."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import Schedule, Times, generate, simulate, verify
from fxsplit.schedule.generators.catalogue import COUNTED, FROM_TIMES
from tests.support.torch_schedules import make_theirs

# GPT of 6.2 and 28.3 billion parameters (Qi et al. 2023): a rank's whole share, in ms, and a transfer.
MEASURED = {8: (18.522, 18.086, 9.337, 0.601), 16: (11.347, 11.248, 8.132, 0.377)}


def make_times(name: str, n_devices: int, measured: tuple[float, float, float, float]) -> Times:
    """Return the times of equal stages from those of a rank's share."""
    each = 1 if name == "ZB-H2" else 2
    forward, backward, weight, hop = measured
    n = each * n_devices
    return Times(
        [forward / each] * n, [(backward + weight) / each] * n, [hop] * n, [hop] * n, weight_ms=[weight / each] * n
    )


def count_most(schedule: Schedule) -> int:
    """Return the most forwards that a device is ahead of the actions that free their activations."""
    return max(sum(held.values()) for device in range(schedule.n_devices) for held in schedule.in_flight(device))


SIZES = [(2, 4), (3, 7), (4, 4), (4, 9), (5, 10), (6, 6), (6, 12), (8, 8), (8, 24), (12, 24), (16, 48)]
CASES = [("ZBVZeroBubble", *size) for size in SIZES]
# Its microbatches divide into rounds.
CASES += [("InterleavedZeroBubble", ranks, count) for ranks, count in SIZES if count % max(1, count // ranks) == 0]


@pytest.mark.parametrize(("name", "ranks", "count"), CASES)
def test_no_schedule_of_torchs_is_faster(name: str, ranks: int, count: int) -> None:
    """In equal times and in measured ones, with no more memory."""
    other = make_theirs(name, ranks, count)
    for times in (Times.unit(2 * ranks), *(make_times(name, ranks, m) for m in MEASURED.values())):
        own = generate(name, ranks, count, times=times)
        verify(own)
        assert count_most(own) <= max(count_most(other), 2 * ranks)
        assert simulate(own, times).step_ms <= simulate(other, times).step_ms + 1e-9


@pytest.mark.parametrize(
    ("name", "count", "idle"),
    [("ZBVZeroBubble", 24, 7.22), ("ZB-H2", 24, 10.83), ("ZB-H1", 24, 15.85)],
)
def test_published_instances(name: str, count: int, idle: float) -> None:
    """Idle shares of 8 ranks with the measured times; ZB-H2 reaches the bound of a line: forwards in front and work."""
    times = make_times("ZB-H2" if name == "ZB-H1" else name, 8, MEASURED[8])
    found = simulate(generate(name, 8, count, times=times), times)
    assert 100 * found.bubble == pytest.approx(idle, abs=0.006)
    if name == "ZB-H2":
        forward, backward, weight, hop = MEASURED[8]
        assert found.step_ms == pytest.approx(7 * (forward + hop) + count * (forward + backward + weight))


@pytest.mark.parametrize("name", FROM_TIMES)
def test_schedules_from_any_times_hold(name: str) -> None:
    """They are legal and within their memory, whatever the times, and mostly faster than those for equal times."""
    random, faster = Random(name), 0
    for _ in range(40):
        ranks = random.randint(1, 5)
        count = ranks * random.randint(1, 4)
        n = ranks if name == "ZB-H2" else 2 * ranks
        forward, late = ([random.uniform(0.0, 3.0) for _ in range(n)] for _ in range(2))
        backward = [w + random.uniform(0.0, 3.0) for w in late]
        hops, back = ([random.uniform(0.0, 1.0)] * n for _ in range(2))
        times = Times(forward, backward, hops, back, weight_ms=late)
        own, equal = generate(name, ranks, count, times=times), generate(name, ranks, count)
        verify(own)
        assert own.homes == equal.homes and own.name == equal.name == name and own.n_microbatches == count
        assert count_most(own) <= 2 * ranks
        steps = [simulate(schedule, times).step_ms for schedule in (own, equal)]
        faster += steps[0] < steps[1] - 1e-9
        if name in COUNTED:
            assert all(a <= b for a, b in zip(own.peak_in_flight(), COUNTED[name](ranks, count), strict=True))
    assert faster >= 5


@pytest.mark.parametrize(("name", "ranks"), [("ZB-H2", 4), ("ZBVZeroBubble", 3)])
def test_weight_gradients_fill_the_latency_of_a_link(name: str, ranks: int) -> None:
    """Messages of half a ms leave every ms or later: on the link or only late, they fill the same gaps."""
    n = ranks if name == "ZB-H2" else 2 * ranks
    none, hop = Times([2.0] * n, [2.0] * n), [0.5] * n
    on_link = generate(name, ranks, 3 * ranks, times=replace(none, forward_hop_ms=hop, backward_hop_ms=hop))
    late = generate(name, ranks, 3 * ranks, times=replace(none, latency_ms=hop))
    assert late == on_link != generate(name, ranks, 3 * ranks, times=none)


def test_times_of_other_stages_are_refused_and_other_schedules_ignore_them() -> None:
    with pytest.raises(ScheduleError, match="ZBVZeroBubble has 4 stages, and forward_ms has 2 times"):
        generate("ZBVZeroBubble", 2, 4, times=Times.unit(2))
    assert generate("1F1B", 2, 4, times=Times.unit(7)) == generate("1F1B", 2, 4)
    three = Times.unit(6)
    assert generate("InterleavedZeroBubble", 2, 4, 3, times=three) == generate("InterleavedZeroBubble", 2, 4, 3)
    with pytest.raises(ScheduleError, match="ZB-H2: 2 stages a device; it is made for 1"):
        generate("ZB-H2", 2, 4, 2)
    with pytest.raises(ScheduleError, match="InterleavedZeroBubble: 5 microbatches do not divide into rounds"):
        generate("InterleavedZeroBubble", 2, 5)


def test_small_schedules_as_drawn() -> None:
    """These stand in the docstrings."""
    assert str(generate("ZBVZeroBubble", 2, 2)) == (
        "0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 0W0 3W1 0W1\n1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1"
    )
    two = generate("ZB-H2", 3, 5)
    assert str(replace(two, actions=two.without("W").actions)).splitlines()[:2] == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0I1 0I2 0I3 0I4",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1I3 1I4",
    ]
