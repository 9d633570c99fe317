"""Memory: how many bytes each device holds at every moment of a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.ir.facts.course import MicrobatchMemory
from fxsplit.schedule.action import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INPUT_GRADIENT,
    RELEASES,
    STEP,
    WEIGHT_GRADIENT,
)
from fxsplit.schedule.outstanding import list_outstanding
from fxsplit.schedule.simulate import Simulation

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


DURING = {
    FORWARD: "forward_bytes",
    BACKWARD: "whole_bytes",
    INPUT_GRADIENT: "early_bytes",
    WEIGHT_GRADIENT: "late_bytes",
    STEP: "step_bytes",
}
"""Which figure of a footprint says what is held, at most, while an action runs; a sum over replicas takes no more."""


def trace_memory(simulation: Simulation, footprints: Sequence[Footprint]) -> tuple[Course, ...]:
    """Return what every device holds over the step; `footprints` are the stages'.

    What a device has sent counts until it is sure that the other device has taken it, whatever actions take.
    """
    schedule = simulation.schedule
    outstanding = list_outstanding(schedule)
    courses = []
    for device, (row, spans) in enumerate(zip(schedule.actions, simulation.spans, strict=True)):
        now = sum(f.held_bytes for f, home in zip(footprints, schedule.homes, strict=True) if device in home)
        course = [(0.0, now)]
        # The versions of the weights after the last action of each stage and replica.
        seen: dict[tuple[int, int], int] = {}
        for place, (action, (begin, end), versions) in enumerate(
            zip(row, spans, schedule.versions(device), strict=True)
        ):
            footprint, one = footprints[action.stage], (action.stage, action.replica)
            sent = 0.0
            for made in outstanding[device][place]:
                of = footprints[made.stage]
                sent += of.sent_bytes if made.op == FORWARD else of.sent_gradient_bytes
            if action.op in RELEASES:
                now -= footprint.halfway_bytes if action.op == WEIGHT_GRADIENT else footprint.resting_bytes
            if action.op == INPUT_GRADIENT:
                now -= footprint.resting_bytes
            if action.op in DURING:
                course.append((begin, now + getattr(footprint, DURING[action.op]) + sent))
            if action.op == FORWARD and schedule.trains:
                now += footprint.resting_bytes
            if action.op == INPUT_GRADIENT:
                now += footprint.halfway_bytes
            if action.op in (FORWARD, *GRADIENTS):
                sent += footprint.sent_bytes if action.op == FORWARD else footprint.sent_gradient_bytes
            # The first version of the weights is among the bytes that are always held.
            now += footprint.parameter_bytes * (versions - seen.get(one, 1))
            seen[one] = versions
            course.append((end, now + sent))
        courses.append(tuple(course))
    return tuple(courses)


def find_peak(course: Course) -> float:
    """Return the most bytes that a device holds at once."""
    return max(bytes_ for _, bytes_ in course)
