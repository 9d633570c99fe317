"""Idle time of a simulated step: why each device waits, and the critical path, the actions that decide the step.

device 0:  | 0F0 | 0F1 |..........| 0B0 |        waits for stage 1, then for the message
device 1:  ......| 1F0 | 1B0 | 1F1 |             the pipeline fills
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fxsplit.schedule.action import REDUCE, Action
from fxsplit.schedule.flow import drop_version, find_waits
from fxsplit.schedule.simulation.simulate import Simulation, Trip

Cause: TypeAlias = Literal["fill", "stage", "transfer", "launch", "replica", "drain"]
CAUSES: dict[Cause, str] = {
    "fill": "the pipeline fills (nothing has arrived yet)",
    "stage": "another stage has not made its input yet",
    "transfer": "a message is still on its way",
    "launch": "its host has not launched the work yet",
    "replica": "another replica of its stage has not made its gradients yet",
    "drain": "the pipeline empties (its own work is done)",
}
"""The causes of idle time, in words that can follow "because"."""
SLACK_MS = 1e-9


@dataclass(frozen=True)
class Idle:
    """An idle time of a device, in ms from the start of the step, and its cause.

    `action` begins after the idle time. `stage` makes the input that this action waits for.
    """

    begin_ms: float
    end_ms: float
    cause: Cause
    action: Action | None = None
    stage: int | None = None


def explain_idle(simulation: Simulation) -> list[list[Idle]]:
    """Return the idle times of each device over the step, in order of time."""
    trips, step_ms = _index_trips(simulation), simulation.step_ms
    found = []
    for row, spans in zip(simulation.schedule.actions, simulation.spans, strict=True):
        idle: list[Idle] = []
        free = 0.0
        for number, (action, (begin, end)) in enumerate(zip(row, spans, strict=True)):
            if begin > free + SLACK_MS:
                first = [Idle(free, begin, "fill", action)]
                idle += _explain_wait(simulation, trips, action, free, begin) if number else first
            free = max(free, end)
        if step_ms > free + SLACK_MS:
            idle.append(Idle(free, step_ms, "drain"))
        found.append(idle)
    return found


def sum_causes(idle: list[Idle]) -> dict[Cause, float]:
    """Return the idle time of each cause in ms, without causes that take no time."""
    sums = {cause: sum(i.end_ms - i.begin_ms for i in idle if i.cause == cause) for cause in CAUSES}
    return {cause: ms for cause, ms in sums.items() if ms > 0}


def find_critical_path(simulation: Simulation) -> list[tuple[int, int]]:
    """Return the actions that decide the length of the step, as (device, place in its row), in order of time.

    Each of these actions begins when the one before it has ended, or when the message of that one has arrived. If one
    of them becomes faster, the step may become shorter. If any other action becomes faster, the step does not.
    """
    schedule, trips = simulation.schedule, _index_trips(simulation)
    place = {drop_version(a): (d, i) for d, row in enumerate(schedule.actions) for i, a in enumerate(row)}
    ends = [(spans[-1][1], -d) for d, spans in enumerate(simulation.spans) if spans]
    if not ends:
        return []
    device = -max(ends)[1]
    at: tuple[int, int] | None = (device, len(simulation.spans[device]) - 1)
    path: list[tuple[int, int]] = []
    while at is not None:
        path.append(at)
        device, number = at
        # The action before on the device, unless a message from another device arrives later.
        before = [(simulation.spans[device][number - 1][1], 1, (device, number - 1))] if number else []
        for need, boundary in find_waits(schedule, schedule.actions[device][number]):
            other, i = place[need]
            trip = trips.get(need) if boundary is not None else None
            ready = simulation.spans[other][i][1] if trip is None else trip.arrive_ms
            before.append((ready, 0, (other, i)))
        # With blocking transfers a message may arrive after the action that takes it is ready: earlier ones only.
        earlier = [entry for entry in before if entry[2] not in path]
        at = max(earlier)[2] if earlier else None
    return path[::-1]


def _index_trips(simulation: Simulation) -> dict[Action, Trip]:
    """Return the message of each action, without weight versions, that sends its result to another device."""
    return {drop_version(trip.message.made): trip for trips in simulation.trips.values() for trip in trips}


def _explain_wait(
    simulation: Simulation, trips: dict[Action, Trip], action: Action, begin: float, end: float
) -> list[Idle]:
    """Return the idle time before an action in parts, by cause.

    The device waits for its last message to depart, then for the message to arrive, then for the action's launch.
    """
    waits = [
        trips[need]
        for need, boundary in find_waits(simulation.schedule, action)
        if boundary is not None and need in trips
    ]
    last = max(waits, key=lambda trip: trip.arrive_ms, default=None)
    if last is None or last.arrive_ms <= begin + SLACK_MS:
        return [Idle(begin, end, "replica" if action.op == REDUCE else "launch", action)]
    departs, arrives = min(max(last.begin_ms, begin), end), min(last.arrive_ms, end)
    parts: tuple[tuple[float, float, Cause], ...] = (
        (begin, departs, "stage"),
        (departs, arrives, "transfer"),
        (arrives, end, "launch"),
    )
    stage = last.message.made.stage
    return [Idle(a, b, cause, action, stage) for a, b, cause in parts if b > a + SLACK_MS]
