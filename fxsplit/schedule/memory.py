"""Memory: how many bytes each device holds at every moment of a simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCE, RELEASES, STEP, WEIGHT_GRADIENT
from fxsplit.schedule.simulate import Simulation

Course = tuple[tuple[float, float], ...]
"""What one device holds over a step, as pairs (from when, in ms; bytes), in order of time."""


@dataclass(frozen=True)
class Footprint:
    """What one stage holds, in bytes.

    - `held_bytes`: always held: weights, their gradients, the optimizer's state, buffers.
    - `kept_bytes`: what autograd keeps of one microbatch from its forward to its backward. With `recompute` it is kept
      only while the forward or the backward runs.
    - `boundary_bytes`: the values of one microbatch that the stage receives and sends, kept until its backward.
    - `parameter_bytes`: one more version of the weights.
    - `waiting_bytes`: what one microbatch has besides from its input gradient to its weight gradient.
    - `working_bytes`: what is there besides while an action runs.
    - `sent_bytes`: of these, the gradients of inputs, which stay until another device has taken them.
    """

    held_bytes: float
    kept_bytes: float
    boundary_bytes: float
    parameter_bytes: float
    recompute: bool = False
    waiting_bytes: float = 0.0
    working_bytes: float = 0.0
    sent_bytes: float = 0.0


def trace_memory(simulation: Simulation, footprints: Sequence[Footprint]) -> tuple[Course, ...]:
    """Return what every device holds over the step; `footprints` are the stages'."""
    schedule = simulation.schedule
    courses = []
    for device, (row, spans) in enumerate(zip(schedule.actions, simulation.spans, strict=True)):
        now = sum(f.held_bytes for f, home in zip(footprints, schedule.homes, strict=True) if device in home)
        course = [(0.0, now)]
        sent = sum(f.sent_bytes for f, home in zip(footprints, schedule.homes, strict=True) if device in home)
        # The versions of the weights after the last action of each stage and replica.
        seen: dict[tuple[int, int], int] = {}
        for action, (begin, end), versions in zip(row, spans, schedule.versions(device), strict=True):
            footprint, place = footprints[action.stage], (action.stage, action.replica)
            kept, boundary = footprint.kept_bytes, footprint.boundary_bytes
            again = footprint.recompute * kept
            if action.op == FORWARD:
                # Activations grow while a forward runs. All of them count from its start, which is never too little.
                now += kept + boundary
            elif action.op in (BACKWARD, INPUT_GRADIENT):
                # A recomputed forward runs at the start of a backward, and makes the activations a second time.
                now += again
            if action.op == INPUT_GRADIENT:
                now += footprint.waiting_bytes
            if action.op not in (STEP, REDUCE):
                course.append((begin, now + footprint.working_bytes + sent - footprint.sent_bytes))
            if action.op == FORWARD:
                now -= again
            if action.op in RELEASES or not schedule.trains:
                now -= boundary + (kept if schedule.trains else kept - again)
            if action.op == WEIGHT_GRADIENT:
                now -= footprint.waiting_bytes
            # The first version of the weights is among the bytes that are always held.
            now += footprint.parameter_bytes * (versions - seen.get(place, 1))
            seen[place] = versions
            course.append((end, now))
        courses.append(tuple(course))
    return tuple(courses)


def find_peak(course: Course) -> float:
    """Return the most bytes that a device holds at once."""
    return max(bytes_ for _, bytes_ in course)
