"""Predict how long a schedule takes from what each action takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, Action, Schedule


@dataclass(frozen=True)
class Simulation:
    """When each action starts and ends, in milliseconds from the step's start."""

    schedule: Schedule
    spans: dict[Action, tuple[float, float]]

    @property
    def step_ms(self) -> float:
        """The time of the whole step."""
        return max((end for _, end in self.spans.values()), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the step that devices idle, mean over devices."""
        busy = sum(end - begin for begin, end in self.spans.values())
        whole = self.step_ms * len(self.schedule.actions)
        return 1.0 - busy / whole if whole else 0.0


def simulate(
    schedule: Schedule, forward_ms: Sequence[float], backward_ms: Sequence[float], hop_ms: Sequence[float] = ()
) -> Simulation:
    """Return the timeline of `schedule`.

    forward_ms, backward_ms: each stage's time for one microbatch. hop_ms[s]: what a value takes from stage s to the
    next, or its gradient back. Raises ScheduleError naming the place where nothing can go on (a deadlock).
    """
    spans: dict[Action, tuple[float, float]] = {}
    at = [0] * len(schedule.actions)
    free = [0.0] * len(schedule.actions)
    hops = list(hop_ms) or [0.0] * (schedule.n_stages - 1)
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            while at[device] < len(row):
                action = row[at[device]]
                ready = _ready(action, schedule.n_stages, spans, hops)
                if ready is None:
                    break
                begin = max(free[device], ready)
                takes = forward_ms if action.op == FORWARD else backward_ms
                free[device] = begin + takes[action.stage]
                spans[action] = (begin, free[device])
                at[device] += 1
                moved = True
    for device, row in enumerate(schedule.actions):
        if at[device] < len(row):
            place = f"device {device}, position {at[device]}, {row[at[device]]}"
            raise ScheduleError(f"{schedule.name} deadlocks: {place} waits for what never comes")
    return Simulation(schedule, spans)


def _ready(
    action: Action, n_stages: int, spans: dict[Action, tuple[float, float]], hops: Sequence[float]
) -> float | None:
    """Return when the values an action needs have arrived, or None while they are not even made."""
    stage, op, m = action
    needs: list[tuple[Action, float]] = []
    if op == FORWARD and stage > 0:
        needs.append((Action(stage - 1, FORWARD, m), hops[stage - 1]))
    if op == BACKWARD:
        needs.append((Action(stage, FORWARD, m), 0.0))
        if stage + 1 < n_stages:
            needs.append((Action(stage + 1, BACKWARD, m), hops[stage]))
    if any(a not in spans for a, _ in needs):
        return None
    return max((spans[a][1] + hop for a, hop in needs), default=0.0)
