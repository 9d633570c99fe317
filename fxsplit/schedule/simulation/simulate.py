"""Simulate: the start and end of every action, given the time of each. Nothing is random or measured.

Each device runs its actions in order, each as soon as its inputs have arrived.

    device 0:  | 0F0 | 0F1 | 0F2 |
    link 0>1:        |=0F0=|=0F1=|=0F2=|        one message at a time
    device 1:              | 1F0 |  1B0  | ...

A *link* leads from one device to another, and carries one message at a time: a forward's value or a backward's
gradient. Messages leave in the order in which they are made; a message that is ready while the link is busy waits. The
opposite direction is a separate link, so values and gradients do not delay each other. If a device has several stages,
all its messages to one other device share a link. If a schedule has its transfers written out, a send puts the message
on the link, and a receive takes no time: the action that uses the value waits for it, as in torch's runtime.

A message occupies its link for its hop, and arrives a latency later. The next message may use the link meanwhile.

    link 0>1:        |=0F0=|=0F1=|=0F2=|
    device 1:              . . . | 1F0 |        0F0 arrives a latency after it has left the link

The host of an accelerator launches the actions in the same order, and runs ahead of the accelerator. It waits only
until the inputs of an action have been launched. On the device, an action begins after its launch has begun, and ends
after its launch has ended. On a CPU, launches take no time and have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.errors import ScheduleError
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, REDUCE, SEND_F, STEP, WEIGHT_GRADIENT, Action
from fxsplit.schedule.flow import Transfer, drop_version, find_message, find_waits, list_done
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.verify import refuse_deadlock


@dataclass(frozen=True)
class Times:
    """The time of each action, in ms for one microbatch. Every list has one entry for each stage.

    - `backward_ms` is a full backward; its weight gradients take `weight_ms` of it (default: half), its input gradients
      the rest
    - `forward_hop_ms[s]` is the time of a value on the link from stage s - 1 to stage s, and `backward_hop_ms[s]` the
      time of its gradient on the link back; both apply only between different devices
    - `reduce_ms` is a sum over replicas, `step_ms` an optimizer step; 0 by default
    - `forward_launch_ms` and `backward_launch_ms` are the launch times on the stage's host; 0 by default
    - `latency_ms[s]` is the time from the end of a message's hop between stages s - 1 and s to its arrival, the same in
      both directions; it applies only between different devices, and is 0 by default
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
    latency_ms: Sequence[float] = ()

    @classmethod
    def unit(cls, n_stages: int) -> Times:
        """Return F = I = W = 1 and B = 2 ms for each of `n_stages` stages, and transfers without time."""
        return cls([1.0] * n_stages, [2.0] * n_stages)

    def of(self, action: Action) -> float:
        """Return how long an action keeps its device busy, in ms; 0 for sends and receives."""
        stage = action.stage
        if action.op == FORWARD:
            return self.forward_ms[stage]
        if action.op in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
            whole = self.backward_ms[stage]
            late = self.weight_ms[stage] if self.weight_ms else whole / 2
            return {BACKWARD: whole, INPUT_GRADIENT: whole - late, WEIGHT_GRADIENT: late}[action.op]
        # Most plans omit times for reductions and steps. The receiver of a transfer waits for it.
        extra = {REDUCE: self.reduce_ms, STEP: self.step_ms}.get(action.op, ())
        return extra[stage] if extra else 0.0

    def launch(self, action: Action) -> float:
        """Return how long the launch of an action keeps the host busy, in ms."""
        stage = action.stage
        if action.op == FORWARD:
            return self.forward_launch_ms[stage] if self.forward_launch_ms else 0.0
        if action.op not in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) or not self.backward_launch_ms:
            return 0.0
        # Divide the launches of a split backward in proportion to the times of its halves.
        whole = self.backward_ms[stage]
        share = self.of(action) / whole if whole else 0.5
        return self.backward_launch_ms[stage] * (1.0 if action.op == BACKWARD else share)

    def hop(self, message: Transfer) -> float:
        """Return how long a message occupies its link, in ms."""
        hops = self.forward_hop_ms if message.made.op in (FORWARD, SEND_F) else self.backward_hop_ms
        return hops[message.boundary] if hops else 0.0

    def latency(self, message: Transfer) -> float:
        """Return how long after its hop a message arrives, in ms."""
        return self.latency_ms[message.boundary] if self.latency_ms else 0.0


class Trip(NamedTuple):
    """A message, which occupies its link from `begin_ms` to `end_ms`; times in ms from the start of the step."""

    message: Transfer
    begin_ms: float
    end_ms: float
    arrive_ms: float


@dataclass(frozen=True)
class Simulation:
    """The start and end of each action: `spans[d][i]` is (begin, end) of the i-th action of device d.

    Times are in ms from the start of the step. `trips` are the messages of each link (source, destination), in the
    order of departure.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float], ...], ...]
    trips: Mapping[tuple[int, int], tuple[Trip, ...]]

    @property
    def step_ms(self) -> float:
        """The time of the whole step, in ms."""
        return max((end for row in self.spans for _, end in row), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The idle share of each device over the step, from 0 to 1."""
        whole = self.step_ms
        busy = [sum(end - begin for begin, end in row) for row in self.spans]
        return tuple(1.0 - b / whole if whole else 0.0 for b in busy)

    @property
    def bubble(self) -> float:
        """The idle share of the step, averaged over devices."""
        return sum(self.bubbles) / max(1, len(self.bubbles))

    @property
    def busy_links(self) -> dict[tuple[int, int], float]:
        """The busy share of each link over the step, from 0 to 1, without links that take no time."""
        busy = {link: sum(trip.end_ms - trip.begin_ms for trip in trips) for link, trips in sorted(self.trips.items())}
        return {link: ms / self.step_ms for link, ms in busy.items() if ms > 0}


def simulate(schedule: Schedule, times: Times) -> Simulation:
    """Simulate `schedule` and return the start and end of every action.

    Raises ScheduleError if `times` has a different number of stages, or for a deadlock, with the first device and
    action that cannot go on.
    """
    check_times(schedule, times)
    # The time at which each result is available: on its own device, and at its receiver.
    ends: dict[Action, float] = {}
    arrivals: dict[Action, float] = {}
    # The time at which the host has launched each action.
    launched: dict[Action, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    trips: dict[tuple[int, int], list[Trip]] = {}
    free, host_free = [0.0] * schedule.n_devices, [0.0] * schedule.n_devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            # Advance a device until it waits for another, which may be simulated later in this round.
            while len(spans[device]) < len(row):
                action = row[len(spans[device])]
                needs = find_waits(schedule, action)
                if any(need not in (ends if boundary is None else arrivals) for need, boundary in needs):
                    break
                host_begin = max([host_free[device], *(launched[need] for need, _ in needs)])
                host_free[device] = host_begin + times.launch(action)
                there = [ends[need] if boundary is None else arrivals[need] for need, boundary in needs]
                begin = max([free[device], host_begin, *there])
                free[device] = max(begin + times.of(action), host_free[device])
                spans[device].append((begin, free[device]))
                done = drop_version(action)
                ends[done], launched[done] = free[device], host_free[device]
                for made in list_done(schedule, device, len(spans[device]) - 1):
                    message = find_message(schedule, made)
                    if message is not None:
                        # Only one device sends over a link, so its messages are added in the order of departure.
                        arrivals[drop_version(made)] = _take_link(trips, message, free[device], times).arrive_ms
                moved = True
    if any(len(found) < len(row) for found, row in zip(spans, schedule.actions, strict=True)):
        # The rounds do not show which devices wait for each other; refuse_deadlock does.
        refuse_deadlock(schedule)
    return Simulation(
        schedule, tuple(tuple(row) for row in spans), {link: tuple(found) for link, found in trips.items()}
    )


def check_times(schedule: Schedule, times: Times) -> None:
    """Raise ScheduleError if `times` has a different number of stages than a schedule."""
    # Without this check a list of another plan that is too long would be used silently.
    for what in ("forward_ms", "backward_ms", "weight_ms", "forward_launch_ms", "backward_launch_ms", "latency_ms"):
        count = len(getattr(times, what))
        if count != schedule.n_stages and (count or what in ("forward_ms", "backward_ms")):
            raise ScheduleError(f"{schedule.name} has {schedule.n_stages} stages, and {what} has {count} times")


def _take_link(trips: dict[tuple[int, int], list[Trip]], message: Transfer, ready_ms: float, times: Times) -> Trip:
    """Put a message that is ready at `ready_ms` on its link after all earlier messages, and return its trip."""
    earlier = trips.setdefault((message.source, message.destination), [])
    begin_ms = max(ready_ms, earlier[-1].end_ms) if earlier else ready_ms
    end_ms = begin_ms + times.hop(message)
    earlier.append(Trip(message, begin_ms, end_ms, end_ms + times.latency(message)))
    return earlier[-1]
