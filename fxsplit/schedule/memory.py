"""Memory: how many bytes each device holds at every moment of a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.schedule.action import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INPUT_GRADIENT,
    REDUCE,
    RELEASES,
    STEP,
    WEIGHT_GRADIENT,
)
from fxsplit.schedule.outstanding import list_outstanding
from fxsplit.schedule.simulate import Simulation

Course = tuple[tuple[float, float], ...]
"""What one device holds over a step, as pairs (from when, in ms; bytes), in order of time."""


@dataclass(frozen=True)
class Footprint:
    """What one stage holds, in bytes.

    - `held_bytes`: always held: weights, their gradients, the optimizer's state, buffers.
    - `parameter_bytes`: one more version of the weights.
    - `resting_bytes`: of one microbatch, from its forward to its backward.
    - `halfway_bytes`: of one microbatch, from its input gradient to its weight gradient.
    - `forward_bytes`, `backward_bytes`, `early_bytes`, `late_bytes`: of one microbatch, at most, while its forward, its
      backward, its input gradient or its weight gradient runs.
    - `step_bytes`: what the optimizer allocates while it steps between microbatches.
    - `sent_bytes`, `sent_gradient_bytes`: values, and gradients, that are made for another device, until it takes them.
    """

    held_bytes: float
    parameter_bytes: float = 0.0
    resting_bytes: float = 0.0
    halfway_bytes: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    early_bytes: float = 0.0
    late_bytes: float = 0.0
    sent_bytes: float = 0.0
    sent_gradient_bytes: float = 0.0
    step_bytes: float = 0.0


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
            if action.op not in (STEP, REDUCE):
                during = {FORWARD: footprint.forward_bytes, BACKWARD: footprint.backward_bytes}
                during |= {INPUT_GRADIENT: footprint.early_bytes, WEIGHT_GRADIENT: footprint.late_bytes}
                course.append((begin, now + during[action.op] + sent))
            elif action.op == STEP:
                course.append((begin, now + footprint.step_bytes + sent))
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
