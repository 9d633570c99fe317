"""Simulate: when every action starts and ends, from what each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, RECV_F, REDUCE, STEP, WEIGHT_GRADIENT, Action
from fxsplit.schedule.flow import needs, plain
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.verify import first_stuck


@dataclass(frozen=True)
class Times:
    """What each action takes, in milliseconds: by stage, and for transfers by the boundary before a stage.

    Of a full backward the gradients of weights take `weight_ms` (half of it unless given), those of inputs the rest.
    `forward_hop_ms[s]` is what a value takes from stage s - 1 to s, `backward_hop_ms[s]` its gradient back; both only
    between devices.
    """

    forward_ms: Sequence[float]
    backward_ms: Sequence[float]
    forward_hop_ms: Sequence[float] = ()
    backward_hop_ms: Sequence[float] = ()
    reduce_ms: Sequence[float] = ()
    step_ms: Sequence[float] = ()
    weight_ms: Sequence[float] = ()

    @classmethod
    def unit(cls, n_stages: int) -> Times:
        """Return F = I = W = 1 and B = 2, with free transfers."""
        return cls([1.0] * n_stages, [2.0] * n_stages)

    def of(self, action: Action) -> float:
        """Return how long a device is busy with an action."""
        stage = action.stage
        if action.op == FORWARD:
            return self.forward_ms[stage]
        if action.op in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
            whole = self.backward_ms[stage]
            late = self.weight_ms[stage] if self.weight_ms else whole / 2
            return {BACKWARD: whole, INPUT_GRADIENT: whole - late, WEIGHT_GRADIENT: late}[action.op]
        extra = {REDUCE: self.reduce_ms, STEP: self.step_ms}.get(action.op, ())
        return extra[stage] if extra else 0.0

    def hop(self, action: Action, boundary: int) -> float:
        """Return how long what `action` waits for is under way over a boundary."""
        hops = self.forward_hop_ms if action.op in (FORWARD, RECV_F) else self.backward_hop_ms
        return hops[boundary] if hops else 0.0


@dataclass(frozen=True)
class Simulation:
    """When each of a device's actions starts and ends, in milliseconds from the step's start: `spans[device][i]`."""

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def step_ms(self) -> float:
        """The time of the whole step."""
        return max((end for row in self.spans for _, end in row), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the step that each device idles."""
        whole = self.step_ms
        busy = [sum(end - begin for begin, end in row) for row in self.spans]
        return tuple(1.0 - b / whole if whole else 0.0 for b in busy)

    @property
    def bubble(self) -> float:
        """The share of the step that devices idle, mean over devices."""
        return sum(self.bubbles) / max(1, len(self.bubbles))


def simulate(schedule: Schedule, times: Times) -> Simulation:
    """Return the timeline of `schedule`: each device does its actions in order, each as soon as what it needs is there.

    Raises ScheduleError naming the place where nothing can go on (a deadlock).
    """
    for what in ("forward_ms", "backward_ms", "weight_ms"):
        count = len(getattr(times, what))
        if count != schedule.n_stages and (count or what != "weight_ms"):
            raise ScheduleError(f"{schedule.name} has {schedule.n_stages} stages, and {what} has {count} times")
    ends: dict[Action, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.n_devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            while len(spans[device]) < len(row):
                action = row[len(spans[device])]
                ready = _ready(schedule, action, ends, times)
                if ready is None:
                    break
                begin = max(free[device], ready)
                free[device] = ends[plain(action)] = begin + times.of(action)
                spans[device].append((begin, free[device]))
                moved = True
    if any(len(done) < len(row) for done, row in zip(spans, schedule.actions, strict=True)):
        stuck = first_stuck(schedule)
        assert stuck is not None
        device, position, need = stuck
        raise ScheduleError(f"{schedule.at(device, position)}: deadlock, it waits for {need}, which never comes")
    return Simulation(schedule, tuple(tuple(row) for row in spans))


def _ready(schedule: Schedule, action: Action, ends: dict[Action, float], times: Times) -> float | None:
    """Return when what an action needs has arrived, or None while some of it is not even made."""
    ready = 0.0
    for need, boundary in needs(schedule, action):
        end = ends.get(need)
        if end is None:
            return None
        ready = max(ready, end + (0.0 if boundary is None else times.hop(action, boundary)))
    return ready
