"""DualPipeV beside torch's own."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fxsplit.schedule import Schedule, Times, generate, simulate, verify
from fxsplit.schedule.action import FORWARD, GRADIENTS
from fxsplit.schedule.generators.dual_pipe import dual_pipe_v
from tests.support.torch_schedules import make_theirs

SIZES = [(2, 4), (2, 5), (3, 6), (3, 9), (4, 8), (4, 17), (5, 12), (8, 16), (8, 24), (11, 23), (16, 48)]


@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_it_is_never_slower_than_torchs(ranks: int, count: int) -> None:
    """In equal times and in uneven ones, with no more memory and the same pairs of microbatches."""
    own, other = generate("DualPipeV", ranks, count), make_theirs("DualPipeV", ranks, count)
    n = 2 * ranks
    uneven = Times(
        [1 + stage / n for stage in range(n)],
        [2.5 - stage / n for stage in range(n)],
        [0.1] * n,
        [0.2] * n,
        weight_ms=[0.7 + stage % 3 / 4 for stage in range(n)],
    )
    for times in (Times.unit(n), uneven):
        assert simulate(own, times).step_ms <= simulate(other, times).step_ms + 1e-9
    assert all(a <= b for a, b in zip(own.peak_activations(), other.peak_activations(), strict=True))
    assert own.homes == other.homes and own.paired == other.paired


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (5, 13), (8, 20)])
def test_it_idles_as_its_authors_state(ranks: int, count: int) -> None:
    """(ranks - 1) (F and B together + B - 3 W) of a stage's times, if a pair takes as long as its two actions."""
    forward, backward, weight = 1, 2, 1
    idle = (ranks - 1) * (forward + backward + backward - 3 * weight)
    found = simulate(generate("DualPipeV", ranks, count), Times.unit(2 * ranks))
    assert found.step_ms == 2 * count * (forward + backward) + idle


def list_pairs(schedule: Schedule) -> list[str]:
    """Return each device's actions as text, with `+` between the actions of a pair."""
    return ["".join(f"{a}{'+' if a in schedule.paired else ' '}" for a in row).strip() for row in schedule.actions]


def test_small_schedules_as_drawn() -> None:
    """The docstring has the first; with fewer microbatches no other action changes."""
    drawn = list_pairs(generate("DualPipeV", 2, 4))
    assert drawn == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]
    assert all(line in (dual_pipe_v.__doc__ or "") for line in drawn)
    assert list_pairs(generate("DualPipeV", 2, 2)) == [
        "0F0 0F1 3F0 3I0 3W0 3F1 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_any_number_of_microbatches(ranks: int) -> None:
    """Also fewer than torch takes; at most 2 ranks + 1 forwards are in flight. Pairs are a forward and a backward."""
    for count in range(1, 3 * ranks + 2):
        schedule = generate("DualPipeV", ranks, count)
        verify(schedule)
        assert max(schedule.peak_activations()) <= min(count, ranks + 0.5)
        for row in schedule.actions:
            for action, after in pairwise(row):
                if action in schedule.paired:
                    assert action.op == FORWARD and after.op in GRADIENTS and after.stage != action.stage
    assert bool(schedule.paired)
