"""Memory: what each device holds while a schedule runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.schedule.action import BACKWARD, FORWARD, RELEASES, STEP, WEIGHT_GRADIENT
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
        used: dict[tuple[int, int], list[int]] = {}
        newest: dict[tuple[int, int], int] = {}
        for action, (begin, end) in zip(row, spans, strict=True):
            footprint, place = footprints[action.stage], (action.stage, action.replica)
            using = used.setdefault(place, [])
            versions = len({newest.get(place, 0), *using})
            if action.op == FORWARD:
                now += footprint.kept_bytes + footprint.boundary_bytes
                course.append((begin, now))
                using.append(action.version)
                if footprint.recompute:
                    now -= footprint.kept_bytes
            elif footprint.recompute and action.op in (BACKWARD, WEIGHT_GRADIENT):
                course.append((begin, now + footprint.kept_bytes))
            if action.op in RELEASES:
                now -= footprint.boundary_bytes + (0.0 if footprint.recompute else footprint.kept_bytes)
                using.remove(action.version)
            elif action.op == STEP:
                newest[place] = action.version
            now += footprint.parameter_bytes * (len({newest.get(place, 0), *using}) - versions)
            course.append((end, now))
        courses.append(tuple(course))
    return tuple(courses)


def peak(course: Course) -> float:
    """Return the most that a device holds."""
    return max(bytes_ for _, bytes_ in course)
