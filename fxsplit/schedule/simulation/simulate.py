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

With *blocking* transfers a device waits for each of its messages, as under Megatron's batched sends and receives. A
device *stops* between two actions for its transfers there: it sends the result of the last action, and receives the
inputs of the next one. If a schedule has its transfers written out, it stops for the ones between the two actions.

    device 0:  | 0F0 | 0F1 |........|=|  0B0  |      0F1's value and 1B0's gradient leave once both have stopped
    device 1:        |  1F0  |  1B0 |=| 1F1 |

- A message begins once its sender has stopped to send it and its receiver to take it. The messages of a stop do not
  wait for each other: two neighbours that send to each other exchange at once.
- Both devices wait until it has arrived, for its hop and its latency. A device goes on once all messages of its stop
  have arrived. Its host waits too, as Megatron's host does.
- Two messages of one stop on one link leave one after the other, in the order of the sender's row.
- If no device can go on, each takes the messages whose senders wait for it, although it needs them only later in its
  row, as Megatron's interleaved schedule does. So every schedule that can run with asynchronous transfers can run with
  blocking ones, and only the order of actions decides which messages are taken early.

The host of an accelerator launches the actions in the same order, and runs ahead of the accelerator. It waits only
until the inputs of an action have been launched. On the device, an action begins after its launch has begun, and ends
after its launch has ended. On a CPU, launches take no time and have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.errors import ScheduleError, suggest
from fxsplit.ir.facts.given.machine import TRANSFER_KINDS, TransferKind
from fxsplit.schedule.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECEIVES,
    REDUCE,
    SEND_F,
    STEP,
    TRANSFERS,
    WEIGHT_GRADIENT,
    Action,
)
from fxsplit.schedule.flow import (
    Transfer,
    drop_version,
    find_message,
    find_needs,
    find_waits,
    list_done,
    with_transfers,
)
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.verify import refuse_deadlock
from fxsplit.system.figures import show


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
    - `transfers`: devices compute while their messages are under way, or wait for them ("blocking")
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
    transfers: TransferKind = "asynchronous"

    @classmethod
    def unit(cls, n_stages: int) -> Times:
        """Return unit times for `n_stages` stages: 1 ms for each F, I and W, 2 ms for a B, and 0 ms for transfers."""
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
    """A message on its link from `begin_ms` to `end_ms`. Times are in ms from the start of the step."""

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
    if times.transfers == "blocking":
        return _simulate_blocking(schedule, times)
    # The time at which each result is available: on its own device, and at its receiver.
    ends: dict[Action, float] = {}
    arrivals: dict[Action, float] = {}
    # The time at which the host has launched each action.
    launched: dict[Action, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]
    trips: dict[tuple[int, int], list[Trip]] = {}
    free, host_free = [0.0] * schedule.n_devices, [0.0] * schedule.n_devices
    # How long an action and its launch last, by its stage and operation.
    lasts: dict[tuple[int, str], tuple[float, float]] = {}
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.actions):
            # Advance a device until it waits for another, which may be simulated later in this round.
            for at in range(len(spans[device]), len(row)):
                action = row[at]
                begin, host_begin = free[device], host_free[device]
                for need, boundary in find_waits(schedule, action):
                    there = ends.get(need) if boundary is None else arrivals.get(need)
                    if there is None:
                        break
                    begin, host_begin = max(begin, there), max(host_begin, launched[need])
                else:
                    if action[:2] not in lasts:
                        lasts[action[:2]] = times.of(action), times.launch(action)
                    last, launch = lasts[action[:2]]
                    begin = max(begin, host_begin)
                    host_free[device] = host_begin + launch
                    free[device] = end = max(begin + last, host_free[device])
                    spans[device].append((begin, end))
                    done = drop_version(action)
                    ends[done], launched[done] = end, host_free[device]
                    for made in list_done(schedule, device, at):
                        message = find_message(schedule, made)
                        if message is not None:
                            # Only one device sends over a link, so its messages are added in the order of departure.
                            arrivals[drop_version(made)] = _take_link(trips, message, end, times).arrive_ms
                    moved = True
                    continue
                break
    if any(len(found) < len(row) for found, row in zip(spans, schedule.actions, strict=True)):
        # The rounds do not show which devices wait for each other; refuse_deadlock does.
        refuse_deadlock(schedule)
    return Simulation(
        schedule, tuple(tuple(row) for row in spans), {link: tuple(found) for link, found in trips.items()}
    )


class _Stops:
    """The simulation of a step with blocking transfers; the docstring of this file defines the stops of a device."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        # Implicit transfers take place where with_transfers() puts them.
        self.schedule = schedule if schedule.transfers else with_transfers(schedule)
        self.times = times
        # The place of each send in its row, the receive of each send, and the send of each transfer.
        self.place: dict[Action, int] = {}
        self.receive: dict[Action, Action] = {}
        self.send: dict[Action, Action] = {}
        for row in self.schedule.actions:
            for at, action in enumerate(map(drop_version, row)):
                if action.op in RECEIVES:
                    self.send[action] = find_needs(self.schedule, action)[0][0]
                    self.receive[self.send[action]] = action
                elif action.op in TRANSFERS:
                    self.place[action], self.send[action] = at, action
        # The end and the launch of each action, and the time at which a device came to the stop of each transfer.
        self.ends: dict[Action, float] = {}
        self.launched: dict[Action, float] = {}
        self.reached: dict[Action, float] = {}
        # For each device: the sends that it takes in its present stop, although only its later actions need them.
        self.early: list[list[Action]] = [[] for _ in self.schedule.actions]
        self.trips: dict[tuple[int, int], list[Trip]] = {}
        self.arrivals: dict[Action, float] = {}
        self.spans: list[list[tuple[float, float]]] = [[] for _ in self.schedule.actions]
        self.free, self.host_free = [0.0] * self.schedule.n_devices, [0.0] * self.schedule.n_devices

    def run(self) -> None:
        """Run all actions; raises ScheduleError for a deadlock."""
        while True:
            moved = False
            for device, row in enumerate(self.schedule.actions):
                while len(self.spans[device]) < len(row) and self._advance(device, row[len(self.spans[device])]):
                    moved = True
            if not moved and not self._receive_early():
                break
        if any(len(found) < len(row) for found, row in zip(self.spans, self.schedule.actions, strict=True)):
            refuse_deadlock(self.schedule)
            lost = min(send for send in self.reached if send.op not in RECEIVES and send not in self.receive)
            raise ScheduleError(f"{self.schedule.name}: {lost} has no receive: verify the schedule")

    def _receive_early(self) -> bool:
        """Let a receiver take a message before its own stop if the sender waits. Return whether any receiver did."""
        # All devices wait, and without this they would wait forever.
        found = False
        for device in range(self.schedule.n_devices):
            for send in map(drop_version, self._read_stop(device)):
                receive = self.receive.get(send)
                if receive is not None and receive not in self.reached:
                    receiver = self.schedule.homes[receive.stage][receive.replica]
                    self.reached[receive] = self.free[receiver]
                    self.early[receiver].append(send)
                    found = True
        return found

    def _read_stop(self, device: int) -> tuple[Action, ...]:
        """Return the transfers of a device's next stop, or none if the device's next action is compute."""
        row, at = self.schedule.actions[device], len(self.spans[device])
        return row[at : next((i for i in range(at, len(row)) if row[i].op not in TRANSFERS), len(row))]

    def _advance(self, device: int, action: Action) -> bool:
        """Let a device run its next action or leave its stop. Return whether the device could do so."""
        stop = self._read_stop(device)
        for transfer in map(drop_version, stop):
            self.reached.setdefault(transfer, self.free[device])
        sends = [*self.early[device], *(self.send[drop_version(transfer)] for transfer in stop)]
        if not self._send(sends):
            return False
        over = max([self.free[device], *(self.arrivals[send] for send in sends)])
        if sends:
            self.host_free[device] = max(self.host_free[device], over)
        if stop:
            for transfer in stop:
                self._end(device, transfer, over, over)
            return True
        needs = [need for need, _ in find_needs(self.schedule, action)]
        if any(need not in self.ends for need in needs):
            return False
        host_begin = max([self.host_free[device], *(self.launched[need] for need in needs)])
        self.host_free[device] = host_begin + self.times.launch(action)
        begin = max([over, host_begin, *(self.ends[need] for need in needs)])
        self._end(device, action, begin, max(begin + self.times.of(action), self.host_free[device]))
        return True

    def _send(self, sends: Sequence[Action]) -> bool:
        """Send each message if its sender and its receiver have both stopped. Return whether all messages were sent."""
        # If several messages leave at once over one link, they all belong to the row of one device.
        for send in sorted(sends, key=lambda send: self.place.get(send, 0)):
            receive = self.receive.get(send)
            if send not in self.arrivals and send in self.reached and receive in self.reached:
                message = find_message(self.schedule, send)
                assert message is not None
                ready_ms = max(self.reached[send], self.reached[receive])
                self.arrivals[send] = _take_link(self.trips, message, ready_ms, self.times).arrive_ms
        return all(send in self.arrivals for send in sends)

    def _end(self, device: int, action: Action, begin: float, end: float) -> None:
        """Record the begin and the end of an action, in ms."""
        self.early[device].clear()
        self.spans[device].append((begin, end))
        self.free[device] = end
        self.ends[drop_version(action)], self.launched[drop_version(action)] = end, self.host_free[device]


def _simulate_blocking(schedule: Schedule, times: Times) -> Simulation:
    """Simulate a step whose devices wait for their messages; raises ScheduleError for a deadlock."""
    stops = _Stops(schedule, times)
    stops.run()
    # Transfers that are not written out have no spans.
    spans = (
        tuple(span for action, span in zip(row, found, strict=True) if schedule.transfers or action.op not in TRANSFERS)
        for row, found in zip(stops.schedule.actions, stops.spans, strict=True)
    )
    return Simulation(schedule, tuple(spans), {link: tuple(found) for link, found in stops.trips.items()})


def check_times(schedule: Schedule, times: Times) -> None:
    """Raise ScheduleError if `times` has a different number of stages than a schedule."""
    # Without this check a list of another plan that is too long would be used silently.
    for what in ("forward_ms", "backward_ms", "weight_ms", "forward_launch_ms", "backward_launch_ms", "latency_ms"):
        count = len(getattr(times, what))
        if count != schedule.n_stages and (count or what in ("forward_ms", "backward_ms")):
            raise ScheduleError(f"{schedule.name} has {schedule.n_stages} stages, and {what} has {count} times")
    if times.transfers not in TRANSFER_KINDS:
        raise ScheduleError(
            f"transfers={show(times.transfers)}: give {' or '.join(TRANSFER_KINDS)}"
            f"{suggest(times.transfers, TRANSFER_KINDS)}"
        )


def _take_link(trips: dict[tuple[int, int], list[Trip]], message: Transfer, ready_ms: float, times: Times) -> Trip:
    """Put a message that is ready at `ready_ms` on its link after all earlier messages, and return its trip."""
    earlier = trips.setdefault((message.source, message.destination), [])
    begin_ms = max(ready_ms, earlier[-1].end_ms) if earlier else ready_ms
    end_ms = begin_ms + times.hop(message)
    earlier.append(Trip(message, begin_ms, end_ms, end_ms + times.latency(message)))
    return earlier[-1]
