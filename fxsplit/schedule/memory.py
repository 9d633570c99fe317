"""Memory: what each device holds while a schedule runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.schedule.action import BACKWARD, FORWARD, RELEASES, WEIGHT_GRADIENT
from fxsplit.schedule.simulate import Simulation

Course = tuple[tuple[float, float], ...]
"""What a device holds: (from when, in ms; bytes)."""


@dataclass(frozen=True)
class Footprint:
    """What a stage holds, in bytes: always (weights, their gradients, optimizer state, buffers), and per microbatch.

    `kept_bytes` is what autograd keeps of a microbatch from forward to backward (with `recompute` only while one of
    them runs), `boundary_bytes` the values received and sent; `parameter_bytes` is one more version of the weights.
    """

    held_bytes: float
    kept_bytes: float
    boundary_bytes: float
    parameter_bytes: float
    recompute: bool = False


def memory(simulation: Simulation, footprints: Sequence[Footprint]) -> tuple[Course, ...]:
    """Return what every device holds over the step."""
    schedule = simulation.schedule
    courses = []
    for device, (row, spans) in enumerate(zip(schedule.actions, simulation.spans, strict=True)):
        now = sum(f.held_bytes for f, home in zip(footprints, schedule.homes, strict=True) if device in home)
        course = [(0.0, now)]
        kept: dict[tuple[int, int], int] = {}
        for action, (begin, end), versions in zip(row, spans, schedule.versions(device), strict=True):
            footprint, place = footprints[action.stage], (action.stage, action.replica)
            if action.op == FORWARD:
                now += footprint.kept_bytes + footprint.boundary_bytes
                course.append((begin, now))
                if footprint.recompute:
                    now -= footprint.kept_bytes
            elif footprint.recompute and action.op in (BACKWARD, WEIGHT_GRADIENT):
                course.append((begin, now + footprint.kept_bytes))
            if action.op in RELEASES:
                now -= footprint.boundary_bytes + (0.0 if footprint.recompute else footprint.kept_bytes)
            now += footprint.parameter_bytes * (versions - kept.get(place, 1))
            kept[place] = versions
            course.append((end, now))
        courses.append(tuple(course))
    return tuple(courses)


def peak(course: Course) -> float:
    """Return the most that a device holds."""
    return max(bytes_ for _, bytes_ in course)
