"""Simulate: when every action starts and ends, from how long each takes.

Each device does its actions in their order, each as soon as what it needs is there. Nothing is drawn or measured.

A *link* leads from one device to another one, and carries one message at a time: the value of a forward, or the
gradient of a backward. Messages leave in the order in which they were made, and one that is ready while another is on
its way waits for it. The way back is a link of its own, so values and gradients do not hold each other up there. Where
a device has several stages, all that it sends to one other device takes the same link.

The host of an accelerator launches the actions in the same order, and need not wait for the accelerator: it only waits
until what an action needs has been launched too. An action begins on the device when its launch has begun, at the
earliest, and ends when its launch has ended, at the earliest. On a CPU launches take no time, and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCE, SEND_F, STEP, WEIGHT_GRADIENT, Action
from fxsplit.schedule.flow import Message, drop_version, find_message, find_needs
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.verify import refuse_deadlock


@dataclass(frozen=True)
class Times:
    """How long each action takes, in milliseconds for one microbatch; every list has one entry for each stage.

    Of a full backward, `backward_ms`, the weights' gradients take `weight_ms` (half of it if none is given), and the
    inputs' gradients the rest. `forward_hop_ms[s]` is how long a value takes the link from stage s - 1 to stage s, and
    `backward_hop_ms[s]` its gradient the link back; both count only where the stages are on different devices.
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

    def hop(self, message: Message) -> float:
        """Return how long a message keeps its link busy, in milliseconds."""
        hops = self.forward_hop_ms if message.made.op in (FORWARD, SEND_F) else self.backward_hop_ms
        return hops[message.boundary] if hops else 0.0


class Trip(NamedTuple):
    """A message on its link, from when to when, in milliseconds from the start of the step."""

    message: Message
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Simulation:
    """When each action starts and ends: `spans[d][i]` is (begin, end) of the i-th action of device d.

    Times are in milliseconds from the start of the step. `trips` are the messages of each link, a pair of devices, in
    the order in which they left.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float], ...], ...]
    trips: Mapping[tuple[int, int], tuple[Trip, ...]]

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

    @property
    def busy_links(self) -> dict[tuple[int, int], float]:
        """The share of the step that each link carries something, from 0 to 1; only links that take time."""
        busy = {link: sum(trip.end_ms - trip.begin_ms for trip in trips) for link, trips in sorted(self.trips.items())}
        return {link: ms / self.step_ms for link, ms in busy.items() if ms > 0}


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
    # When what each action makes is there: where it was made, and, if it crosses, where it is needed.
    ends: dict[Action, float] = {}
    arrivals: dict[Action, float] = {}
    # When the host of each action has launched it.
    launched: dict[Action, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    trips: dict[tuple[int, int], list[Trip]] = {}
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
                there = [ends[need] if boundary is None else arrivals[need] for need, boundary in needs]
                begin = max([free[device], host_begin, *there])
                free[device] = max(begin + times.of(action), host_free[device])
                spans[device].append((begin, free[device]))
                done = drop_version(action)
                ends[done], launched[done] = free[device], host_free[device]
                message = find_message(schedule, action)
                if message is not None:
                    # Only its own source sends over a link, so messages come here in the order in which they leave.
                    trip = _take_link(trips, message, free[device], times.hop(message))
                    arrivals[done] = trip.end_ms
                moved = True
    if any(len(found) < len(row) for found, row in zip(spans, schedule.actions, strict=True)):
        # Simulated order does not tell who waits for whom in the circle; the verifier's search does.
        refuse_deadlock(schedule)
    return Simulation(
        schedule, tuple(tuple(row) for row in spans), {link: tuple(found) for link, found in trips.items()}
    )


def _take_link(trips: dict[tuple[int, int], list[Trip]], message: Message, ready_ms: float, hop_ms: float) -> Trip:
    """Note and return when a message that is ready at `ready_ms` is on its link: behind all that left before it."""
    earlier = trips.setdefault((message.source, message.destination), [])
    begin_ms = max(ready_ms, earlier[-1].end_ms) if earlier else ready_ms
    earlier.append(Trip(message, begin_ms, begin_ms + hop_ms))
    return earlier[-1]
