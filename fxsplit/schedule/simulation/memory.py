"""Memory: how many bytes each device holds at every moment of a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.ir.facts.memory.microbatch import MicrobatchMemory
from fxsplit.ir.facts.memory.moments import Moment, count_moving
from fxsplit.schedule.moments import DURING, follow_device
from fxsplit.schedule.outstanding import list_outstanding
from fxsplit.schedule.simulation.simulate import Simulation

Course = tuple[tuple[float, float], ...]
"""What one device holds over a step, as pairs (from when, in ms; bytes), in order of time."""


@dataclass(frozen=True)
class Footprint(MicrobatchMemory):
    """What one stage holds, in bytes: of each microbatch, and besides

    - `held_bytes`: always held: weights, their gradients, the optimizer's state, buffers.
    - `parameter_bytes`: one more version of the weights.
    - `step_bytes`: what the optimizer allocates while it steps between microbatches.
    """

    held_bytes: float
    parameter_bytes: float = 0.0
    step_bytes: float = 0.0


def trace_memory(simulation: Simulation, footprints: Sequence[Footprint]) -> tuple[Course, ...]:
    """Return what every device holds over the step; `footprints` are the stages'.

    What a device has sent counts until it is sure that the other device has taken it, whatever actions take.
    """
    schedule = simulation.schedule
    courses = []
    for device, (spans, outstanding) in enumerate(zip(simulation.spans, list_outstanding(schedule), strict=True)):
        always = sum(f.held_bytes for f, home in zip(footprints, schedule.homes, strict=True) if device in home)

        def count(held: dict[int, Moment], always: float = always) -> float:
            return always + sum(count_moving(footprints[stage], moment) for stage, moment in held.items())

        # Before the first action there is what is there before every step.
        course = [(0.0, always)]
        for turn, (begin, end) in zip(follow_device(schedule, device, outstanding), spans, strict=True):
            if turn.action.op in DURING:
                course.append((begin, count(turn.during)))
            course.append((end, count(turn.behind)))
        courses.append(tuple(course))
    return tuple(courses)


def find_peak(course: Course) -> float:
    """Return the most bytes that a device holds at once."""
    return max(bytes_ for _, bytes_ in course)
