"""Simulate: when every action starts and ends, from how long each takes.

Each device does its actions in their order, each as soon as what it needs is there. Nothing is drawn or measured.

The host of an accelerator launches the actions in the same order, and need not wait for the accelerator: it only waits
until what an action needs has been launched too. An action begins on the device when its launch has begun, at the
earliest, and ends when its launch has ended, at the earliest. On a CPU launches take no time, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, RECV_F, REDUCE, STEP, WEIGHT_GRADIENT, Action
from fxsplit.schedule.flow import Need, drop_version, find_needs
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.verify import refuse_deadlock


@dataclass(frozen=True)
class Times:
    """How long each action takes, in milliseconds for one microbatch; every list has one entry for each stage.

    Of a full backward, `backward_ms`, the weights' gradients take `weight_ms` (half of it if none is given), and the
    inputs' gradients the rest. `forward_hop_ms[s]` is how long a value is under way from stage s - 1 to stage s, and
    `backward_hop_ms[s]` its gradient on the way back; both count only where the stages are on different devices.
    `reduce_ms` is a sum over replicas, `step_ms` a step of the optimizer; both take nothing where they are not given.
    `forward_launch_ms` and `backward_launch_ms` are how long the host of a stage launches; nothing where not given.
    """

    forward_ms: Sequence[float]
    backward_ms: Sequence[float]
    forward_hop_ms: Sequence[float] = ()
    backward_hop_ms: Sequence[float] = ()
    reduce_ms: Sequence[float] = ()
    step_ms: Sequence[float] = ()
    weight_ms: Sequence[float] = ()
    forward_launch_ms: Sequence[float] = ()
    backward_launch_ms: Sequence[float] = ()

    @classmethod
    def unit(cls, n_stages: int) -> Times:
        """Return F = I = W = 1 and B = 2 ms for each of `n_stages` stages, with transfers that take no time."""
        return cls([1.0] * n_stages, [2.0] * n_stages)

    def of(self, action: Action) -> float:
        """Return how long a device is busy with an action, in milliseconds: not at all with sends and receives."""
        stage = action.stage
        if action.op == FORWARD:
            return self.forward_ms[stage]
        if action.op in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
            whole = self.backward_ms[stage]
            late = self.weight_ms[stage] if self.weight_ms else whole / 2
            return {BACKWARD: whole, INPUT_GRADIENT: whole - late, WEIGHT_GRADIENT: late}[action.op]
        # Sums and steps are left out of most plans, and transfers are paid for by those who wait for them.
        extra = {REDUCE: self.reduce_ms, STEP: self.step_ms}.get(action.op, ())
        return extra[stage] if extra else 0.0

    def launch(self, action: Action) -> float:
        """Return how long a host is busy with launching an action, in milliseconds."""
        stage = action.stage
        if action.op == FORWARD:
            return self.forward_launch_ms[stage] if self.forward_launch_ms else 0.0
        if action.op not in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) or not self.backward_launch_ms:
            return 0.0
        # Launches of the two halves of a backward are in proportion to what the halves take.
        whole = self.backward_ms[stage]
        share = self.of(action) / whole if whole else 0.5
        return self.backward_launch_ms[stage] * (1.0 if action.op == BACKWARD else share)

    def hop(self, action: Action, boundary: int) -> float:
        """Return how long what `action` waits for is under way over a boundary, in milliseconds."""
        # A value crosses a boundary forwards if a forward waits for it; all else that crosses is a gradient.
        hops = self.forward_hop_ms if action.op in (FORWARD, RECV_F) else self.backward_hop_ms
        return hops[boundary] if hops else 0.0


@dataclass(frozen=True)
class Simulation:
    """When each action starts and ends: `spans[d][i]` is (begin, end) of the i-th action of device d.

    Times are in milliseconds from the start of the step.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def step_ms(self) -> float:
        """The time of the whole step, in milliseconds."""
        return max((end for row in self.spans for _, end in row), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the step that each device is idle, from 0 to 1."""
        whole = self.step_ms
        busy = [sum(end - begin for begin, end in row) for row in self.spans]
        return tuple(1.0 - b / whole if whole else 0.0 for b in busy)

    @property
    def bubble(self) -> float:
        """The share of the step that devices are idle, as a mean over devices."""
        return sum(self.bubbles) / max(1, len(self.bubbles))


def simulate(schedule: Schedule, times: Times) -> Simulation:
    """Return when every action of `schedule` starts and ends.

    Raises ScheduleError where `times` are for another number of stages, and where devices wait for each other for ever
    (a deadlock), naming the first device and action that cannot go on.
    """
    # A list of another plan would be read without an error where it is too long.
    for what in ("forward_ms", "backward_ms", "weight_ms", "forward_launch_ms", "backward_launch_ms"):
        count = len(getattr(times, what))
        if count != schedule.n_stages and (count or what in ("forward_ms", "backward_ms")):
            raise ScheduleError(f"{schedule.name} has {schedule.n_stages} stages, and {what} has {count} times")
    # When each action ends on its device, and when its host has launched it.
    ends: dict[Action, float] = {}
    launched: dict[Action, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    free, host_free = [0.0] * schedule.n_devices, [0.0] * schedule.n_devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            # A device goes on until it waits for another one. What it waits for may be simulated later in this turn.
            while len(spans[device]) < len(row):
                action = row[len(spans[device])]
                needs = find_needs(schedule, action)
                if any(need not in ends for need, _ in needs):
                    break
                host_begin = max([host_free[device], *(launched[need] for need, _ in needs)])
                host_free[device] = host_begin + times.launch(action)
                begin = max([free[device], host_begin, *(_arrive(need, ends, action, times) for need in needs)])
                free[device] = max(begin + times.of(action), host_free[device])
                spans[device].append((begin, free[device]))
                done = drop_version(action)
                ends[done], launched[done] = free[device], host_free[device]
                moved = True
    if any(len(found) < len(row) for found, row in zip(spans, schedule.actions, strict=True)):
        # Simulated order does not tell who waits for whom in the circle; the verifier's search does.
        refuse_deadlock(schedule)
    return Simulation(schedule, tuple(tuple(row) for row in spans))


def _arrive(need: Need, ends: dict[Action, float], action: Action, times: Times) -> float:
    """Return when what another action has made is where `action` needs it, in milliseconds."""
    made, boundary = need
    return ends[made] + (0.0 if boundary is None else times.hop(action, boundary))
