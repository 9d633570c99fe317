"""What devices hold, in order of time, for schedules of few actions."""

from __future__ import annotations

from typing import Any

import pytest

from fxsplit.schedule import Times, generate, simulate
from fxsplit.schedule.memory import Footprint, find_peak, trace_memory


def test_one_microbatch_on_one_device() -> None:
    """1000 always, 10 kept, 3 of boundaries, from the forward's start to the backward's end."""
    simulation = simulate(generate("GPipe", 1, 1), Times.unit(1))
    course: Any
    (course,) = trace_memory(simulation, [Footprint(1000, 10, 3, 500)])
    assert course == ((0, 1000), (0, 1013), (1, 1013), (1, 1013), (3, 1000))
    again: Any
    (again,) = trace_memory(simulation, [Footprint(1000, 10, 3, 500, recompute=True)])
    assert again == ((0, 1000), (0, 1013), (1, 1003), (1, 1013), (3, 1000))


def test_a_divided_backward_frees_at_its_weight_gradient() -> None:
    simulation = simulate(generate("ZB-H1", 1, 1), Times.unit(1))
    course: Any
    (course,) = trace_memory(simulation, [Footprint(0, 10, 3, 0)])
    assert course == ((0, 0), (0, 13), (1, 13), (1, 13), (2, 13), (2, 13), (3, 0))
    again: Any
    (again,) = trace_memory(simulation, [Footprint(0, 10, 3, 0, recompute=True)])
    assert again == ((0, 0), (0, 13), (1, 3), (1, 13), (2, 13), (2, 13), (3, 0)), "what was recomputed stays"


def test_working_memory_is_there_while_an_action_runs() -> None:
    """5 while it runs; what waits for a weight gradient, 2, from the input gradient's start to that one's end."""
    simulation = simulate(generate("ZB-H1", 1, 1), Times.unit(1))
    (course,) = trace_memory(simulation, [Footprint(0, 10, 3, 0, waiting_bytes=2, working_bytes=5)])
    assert [bytes_ for _, bytes_ in course] == [0, 18, 13, 20, 15, 20, 0]


def test_gradients_that_other_stages_of_a_device_have_sent_are_there_too() -> None:
    simulation = simulate(generate("LoopedBFS", 1, 1, 2), Times.unit(2))
    (course,) = trace_memory(simulation, [Footprint(0, 0, 0, 0, False, 0, 5, 1), Footprint(0, 0, 0, 0, False, 0, 7, 2)])
    assert find_peak(course) == 7 + 1


def test_stages_of_one_device_add_up_and_others_do_not_count() -> None:
    simulation = simulate(generate("LoopedBFS", 2, 1), Times.unit(4))
    courses = trace_memory(simulation, [Footprint(10.0**s, 0, 0, 0) for s in range(4)])
    assert [course[0][1] for course in courses] == [101, 1010]


def test_further_versions_of_the_weights_are_held_while_they_are_used() -> None:
    simulation = simulate(generate("PipeDream", 2, 4), Times.unit(2))
    first, second = trace_memory(simulation, [Footprint(100, 0, 0, 7), Footprint(100, 0, 0, 7)])
    assert find_peak(first) == 107 and find_peak(second) == 100
    assert first[-1][1] == 100, "at the end the newest version alone is left"


def test_the_peak_is_the_largest_and_not_the_last() -> None:
    assert find_peak(((0.0, 1.0), (1.0, 5.0), (2.0, 2.0))) == pytest.approx(5.0)
