"""The memory of devices over time, for schedules of few actions."""

from __future__ import annotations

from typing import Any

import pytest

from fxsplit.schedule import Times, generate, simulate
from fxsplit.schedule.simulation.memory import Footprint, find_peak, trace_memory


def test_one_microbatch_on_one_device() -> None:
    """1000 with sums of gradients of 100; 15 while it runs forward, 13 at rest, 120 while it makes the sums."""
    simulation = simulate(generate("GPipe", 1, 1), Times.unit(1))
    trace: Any
    (trace,) = trace_memory(simulation, [Footprint(1000, 100, resting_bytes=13, forward_bytes=15, first_bytes=120)])
    assert trace == ((0, 1000), (0, 915), (1, 913), (1, 1020), (3, 1000))


def test_a_divided_backward_frees_at_its_weight_gradient() -> None:
    simulation = simulate(generate("ZB-H1", 1, 1), Times.unit(1))
    trace: Any
    footprint = Footprint(
        0, resting_bytes=13, halfway_bytes=17, forward_bytes=15, whole_bytes=99, early_bytes=20, late_bytes=18
    )
    (trace,) = trace_memory(simulation, [footprint])
    assert trace == ((0, 0), (0, 15), (1, 13), (1, 20), (2, 17), (2, 18), (3, 0))


def test_what_is_sent_is_held_until_it_is_taken_for_sure() -> None:
    """Device 0 knows that a value was taken once the next stage's gradient comes back."""
    simulation = simulate(generate("1F1B", 2, 3), Times.unit(2))
    first: Any
    first, second = trace_memory(simulation, [Footprint(0, sent_bytes=1), Footprint(0, sent_gradient_bytes=10)])
    assert [str(action) for action in simulation.schedule.actions[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert [bytes_ for _, bytes_ in first[1::2]] == [0, 1, 1, 1, 1, 0], "at 0B0 the value of 0F1 may wait still"
    assert [str(action) for action in simulation.schedule.actions[1]] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    assert [bytes_ for _, bytes_ in second[1::2]] == [0, 0, 10, 10, 10, 10], "1F2 has what 0F2 made after 0B0"


def test_an_optimizer_that_steps_between_microbatches_allocates() -> None:
    simulation = simulate(generate("PipeDream", 1, 1), Times.unit(1))
    (trace,) = trace_memory(simulation, [Footprint(100, step_bytes=7)])
    assert find_peak(trace) == 107


def test_stages_of_one_device_add_up_and_others_do_not_count() -> None:
    simulation = simulate(generate("LoopedBFS", 2, 1), Times.unit(4))
    traces = trace_memory(simulation, [Footprint(10.0**s) for s in range(4)])
    assert [trace[0][1] for trace in traces] == [101, 1010]


def test_further_versions_of_the_weights_are_held_while_they_are_used() -> None:
    simulation = simulate(generate("PipeDream", 2, 4), Times.unit(2))
    first, second = trace_memory(simulation, [Footprint(100, 7), Footprint(100, 7)])
    assert find_peak(first) == 107 and find_peak(second) == 100
    assert first[-1][1] == 100 - 7, "at the end the newest version alone is left, and the step has taken the sums"


def test_the_peak_is_the_largest_and_not_the_last() -> None:
    assert find_peak(((0.0, 1.0), (1.0, 5.0), (2.0, 2.0))) == pytest.approx(5.0)
