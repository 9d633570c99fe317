"""V-Half and V-Min: blocks without conflicts, memory within its limit, and idle time in published times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.zero_bubble import INSTANCES, Instance, count_kept, find_memory, make_times
from fxsplit.schedule import Action, Schedule, Times, generate, simulate, verify
from fxsplit.schedule.action import FORWARD, INPUT_GRADIENT
from fxsplit.schedule.generators import blocks

LIMITS: dict[str, tuple[Callable[[int], int], Callable[[int], int]]] = {
    "V-Half": (lambda ranks: ranks + 1, lambda ranks: ranks + 3),
    "V-Min": (lambda ranks: 2 * (ranks // 3) + 2, lambda ranks: 2 * (ranks // 3) + 4),
}
"""The most forwards that a device is ahead of its input gradients and of its weight gradients."""


def count_ahead(schedule: Schedule) -> int:
    """Return the most forwards that a device is ahead of its input gradients."""
    most = 0
    for row in schedule.actions:
        ahead = 0
        for action in row:
            ahead += (action.op == FORWARD) - (action.op == INPUT_GRADIENT)
            most = max(most, ahead)
    return most


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_every_size_is_legal_and_within_its_memory(name: str, ranks: int) -> None:
    ahead, held = (limit(ranks) for limit in LIMITS[name])
    for count in {1, 2, 3, ranks, 2 * ranks + 1, 4 * ranks}:
        schedule = generate(name, ranks, count)
        verify(schedule)
        assert count_ahead(schedule) <= min(ahead, 2 * count)
        assert 2 * max(schedule.peak_activations()) <= min(held, 2 * ranks, 2 * count)
    assert count_ahead(schedule) == ahead, "a long schedule needs all of it"


@pytest.mark.parametrize("offsets", [blocks.Offsets(1, 2, 3), blocks.Offsets(1, 1, 2)])
def test_blocks_repeat_without_conflicts(offsets: blocks.Offsets) -> None:
    """By the definition: four starts at different times of a period, in the order of the data flow."""
    for ranks in range(1, 40):
        block = blocks._find_block(ranks, offsets)
        path = [*(row[0] for row in block), *(row[1] for row in reversed(block))]
        path += [*(row[2] for row in block), *(row[3] for row in reversed(block))]
        assert len(block) == ranks and sorted(set(path)) == path
        assert all(len({start % 6 for start in row}) == 4 for row in block)
        ahead = LIMITS["V-Half" if offsets.both == 3 else "V-Min"][0](ranks)
        # Counted microbatch by microbatch, in a period after the first microbatches are over.
        for f0, f1, i1, i0 in block:
            for now in range(6 * ranks + 60, 6 * ranks + 66):
                ms = range(2 * ranks + 12)
                started = [sum(start + 6 * m <= now for m in ms) for start in (f0, f1, i1, i0)]
                assert started[0] + started[1] - started[2] - started[3] <= ahead


CASES = [INSTANCES[i] for i in (0, 3, 6)]


@pytest.mark.parametrize("one", CASES, ids=[f"{one.ranks}x{one.batch}" for one in CASES])
def test_published_instances(one: Instance) -> None:
    """The memory of the first device under 1F1B is 1; at its measured times no other device under 1F1B holds more."""
    times, found = make_times(one, 2), {}
    for name, most, idle in (("V-Half", 0.62, 0.24), ("V-Min", 0.50, 0.40)):
        schedule = generate(name, one.ranks, one.batch, times=times)
        verify(schedule)
        found[name] = simulate(schedule, times).bubble
        assert find_memory(schedule, count_kept(one)) <= most and found[name] <= idle
    assert found["V-Half"] < found["V-Min"]
    assert find_memory(generate("1F1B", one.ranks, one.batch), 1.0) == 1


def test_memory_is_counted_as_defined() -> None:
    """On one device: 0F0 1F0 hold two halves, an I frees a quarter of its half, and a W the rest."""
    text = "0F0 1F0 1I0 0F1 0I0 1W0 0W0 1F1 1I1 0I1 1W1 0W1"
    row = tuple(Action.parse(word) for word in text.split())
    schedule = Schedule("own", 2, ((0,), (0,)), (row,))
    verify(schedule)
    assert find_memory(schedule, 0.75) == pytest.approx(2 * 0.5 - 0.25 * 0.5 + 0.5)
    assert find_memory(schedule, 1.0) == max(schedule.peak_activations()) == 1.5


def test_unequal_times_change_only_the_weight_gradients() -> None:
    times = Times([1, 2, 1, 2], [4, 2, 4, 2], [0.5] * 4, [0.5] * 4, weight_ms=[3, 1, 1, 1])
    own, equal = generate("V-Half", 2, 6, times=times), generate("V-Half", 2, 6)
    assert own != equal and own.without("W").actions == equal.without("W").actions
    assert simulate(own, times).step_ms < simulate(equal, times).step_ms


def test_small_schedules_as_drawn() -> None:
    """The first is the drawing of the file's docstring, executed as early as possible, with W in its gaps."""
    assert str(generate("V-Half", 2, 3)) == (
        "0F0 3F0 3I0 0F1 3W0 3F1 3I1 0F2 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2\n"
        "1F0 2F0 2I0 1F1 2F1 1I0 2W0 2I1 1F2 1W0 2F2 1I1 2W1 2I2 1I2 1W1 2W2 1W2"
    )
    assert str(generate("V-Min", 2, 3)) == (
        "0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2\n"
        "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2"
    )
