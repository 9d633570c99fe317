"""Blocking transfers: small steps by hand, and all schedules against a second simulation from the definition."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from fxsplit.errors import ScheduleError
from fxsplit.schedule import SCHEDULES, Action, Schedule, Times, generate, simulate, verify
from fxsplit.schedule.flow import with_transfers
from fxsplit.schedule.generators.catalogue import RUNNABLE
from fxsplit.schedule.generators.synchronous import run_forwards, schedule_replicas
from fxsplit.schedule.homes import line
from tests.schedule.simulation.test_simulate import parse_rows, spans_of

Message = tuple[str, int, int]
"""A value ("F") or a gradient ("B"), the stage that makes it, and the microbatch."""


@dataclass
class Place:
    """A device: its groups of actions that run together, and before each, and at the end, a stop with messages."""

    groups: list[list[Action]]
    sends: list[list[Message]]
    takes: list[list[Message]]
    at: int = 0
    stopped: bool = True
    since: float = 0.0
    ends: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)


def read_places(schedule: Schedule) -> list[Place]:
    """Return the devices with the messages of each stop, read from the definition of a pipeline."""
    where = {(a.stage, a.microbatch): d for d, row in enumerate(schedule.actions) for a in row if a.op in "FBI"}
    last, places = schedule.n_stages - 1, []
    for device, row in enumerate(schedule.actions):
        groups: list[list[Action]] = []
        for at, action in enumerate(row):
            if at and row[at - 1] in schedule.paired:
                groups[-1].append(action)
            else:
                groups.append([action])
        sends: list[list[Message]] = [[] for _ in range(len(groups) + 1)]
        takes: list[list[Message]] = [[] for _ in range(len(groups) + 1)]
        for i, group in enumerate(groups):
            for stage, op, m, *_ in group:
                way = {"F": 1, "B": -1, "I": -1}.get(op, 0)
                kind = "F" if way == 1 else "B"
                if way and 0 <= stage + way <= last and where[stage + way, m] != device:
                    sends[i + 1].append((kind, stage, m))
                if way and 0 <= stage - way <= last and where[stage - way, m] != device:
                    takes[i].append((kind, stage - way, m))
        places.append(Place(groups, sends, takes))
    return places


class World:
    """Devices that stop and exchange, moved by events in order of time; knows nothing of how `simulate` works.

    If all devices wait, it lets them take each message whose sender waits in the stop that they are in, and begins
    again: so these messages belong to these stops, whatever the times.
    """

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule, self.times = schedule, times
        self.early: dict[Message, tuple[int, int, int]] = {}
        while not self.run():
            late = [message for p in self.places for message in p.sends[p.at] if message not in self.begun]
            moved = {m: self.places[self.find_taker(m)] for m in late if m not in self.early}
            turn = len({turn for _, _, turn in self.early.values()})
            self.early |= {m: (self.find_taker(m), taker.at, turn) for m, taker in moved.items()}
            assert moved, "a deadlock under any transfers"

    def find_taker(self, message: Message) -> int:
        return next(d for d, place in enumerate(self.places) if any(message in taken for taken in place.takes))

    def run(self) -> bool:
        """Run until nothing happens any more, and return whether all actions are over."""
        self.places = read_places(self.schedule)
        for message, (device, stop, _) in self.early.items():
            taker = self.places[device]
            next(taken for taken in taker.takes if message in taken).remove(message)
            taker.takes[stop].append(message)
        self.begun: dict[Message, float] = {}
        self.arrived: dict[Message, float] = {}
        self.links: dict[tuple[int, int], float] = {}
        self.reduced: set[tuple[int, int]] = set()
        now = 0.0
        while True:
            while self.begin_messages(now) or self.move_devices(now):
                pass
            events = [*self.links.values(), *self.arrived.values(), *(p.ends for p in self.places)]
            later = [time for time in events if time > now]
            if not later:
                return all(p.at == len(p.groups) and self.is_over(p, now) for p in self.places)
            now = min(later)

    def is_over(self, place: Place, now: float) -> bool:
        return all(self.arrived.get(m, now + 1) <= now for m in place.sends[place.at] + place.takes[place.at])

    def begin_messages(self, now: float) -> bool:
        """Begin a message whose two devices have stopped for it and whose link is free; those taken early come last."""
        able = []
        for source, a in enumerate(self.places):
            for target, b in enumerate(self.places):
                if a.stopped and b.stopped and self.links.get((source, target), 0.0) <= now:
                    both = [m for m in a.sends[a.at] if m in b.takes[b.at] and m not in self.begun]
                    both.sort(key=lambda m: self.early.get(m, (0, 0, -1))[2])
                    able += [(m, (source, target)) for m in both[:1]]
        for message, link in able:
            kind, stage, _ = message
            hops = self.times.forward_hop_ms if kind == "F" else self.times.backward_hop_ms
            boundary = stage + 1 if kind == "F" else stage
            self.begun[message] = now
            self.links[link] = now + hops[boundary]
            self.arrived[message] = now + hops[boundary] + self.times.latency_ms[boundary]
        return bool(able)

    def move_devices(self, now: float) -> bool:
        """Let a device end its actions, or leave its stop and begin the next ones."""
        for p in self.places:
            if not p.stopped and p.ends <= now:
                self.reduced |= {(a.stage, a.microbatch) for a in p.groups[p.at - 1] if a.op in "BW"}
                p.stopped, p.since = True, now
                return True
            if p.stopped and p.at < len(p.groups) and self.is_over(p, now) and self.has_sums(p.groups[p.at]):
                p.stopped, p.ends = False, now
                for action in p.groups[p.at]:
                    p.spans.append((p.ends, p.ends + self.times.of(action)))
                    p.ends = p.spans[-1][1]
                p.at += 1
                return True
        return False

    def has_sums(self, group: list[Action]) -> bool:
        """Return whether the gradients that a sum over replicas needs are all there."""
        wanted = range(self.schedule.n_microbatches)
        return all(a.op != "REDUCE" or all((a.stage, m) in self.reduced for m in wanted) for a in group)


def random_times(stages: int, seed: int) -> Times:
    """Return random times in whole milliseconds, which add up exactly; some are 0."""
    draw = random.Random(seed)
    lists = [[float(draw.randint(0, most)) for _ in range(stages)] for most in (9, 18, 12, 12, 5, 6)]
    weight = [float(draw.randint(0, int(whole))) for whole in lists[1]]
    forward, backward, there, back, reduce, latency = lists
    return Times(forward, backward, there, back, reduce, weight_ms=weight, latency_ms=latency, transfers="blocking")


def check(schedule: Schedule, times: Times) -> int:
    """Compare spans and messages with the second simulation's; return how many messages were taken early."""
    world, found = World(schedule, times), simulate(schedule, times)
    assert [list(row) for row in found.spans] == [place.spans for place in world.places]
    trips = [trip for trips in found.trips.values() for trip in trips]
    assert sorted(trip.begin_ms for trip in trips) == sorted(world.begun.values())
    assert sorted(trip.arrive_ms for trip in trips) == sorted(world.arrived.values())
    written = simulate(with_transfers(schedule), times)
    assert written.step_ms == found.step_ms and written.trips == found.trips
    return len(world.early)


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_schedules_are_exact(name: str) -> None:
    draw, cases = random.Random(name), 0
    while cases < 40:
        try:
            schedule = generate(name, draw.randint(1, 5), draw.randint(1, 9))
        except ScheduleError:
            continue
        check(schedule, random_times(schedule.n_stages, draw.randint(0, 10**6)))
        cases += 1


def test_orders_of_synchronous_schedules_that_need_early_messages() -> None:
    """Senders and receivers of several stages a device, and of ZB-H2, may wait for each other in a circle."""
    early = {}
    for name in RUNNABLE:
        schedule = generate(name, 4, 12)
        early[name] = check(schedule, random_times(schedule.n_stages, 1))
    assert {name for name, count in early.items() if not count} == {"GPipe", "1F1B", "ZB-H1", "V-Min"}


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize("homes", [((0,), (1, 2, 3), (4,)), ((0, 1), (2,)), ((0, 1), (2, 3))])
def test_replicas(name: str, homes: tuple[tuple[int, ...], ...]) -> None:
    for seed in range(5):
        schedule = schedule_replicas(name, homes, 7, [7] * len(homes))
        check(schedule, random_times(len(homes), seed))


def test_forwards_without_training() -> None:
    for seed in range(10):
        check(run_forwards(line(3), 6), random_times(3, seed))


def draw_schedule(seed: int) -> Schedule:
    """Return a random legal order of few actions, with some that run together if that is legal."""
    draw = random.Random(seed)
    devices, stages, count = draw.randint(2, 4), draw.randint(2, 5), draw.randint(1, 4)
    homes = tuple((draw.randrange(devices),) for _ in range(stages))
    rows: list[list[Action]] = [[] for _ in range(devices)]
    way = [("F", s) for s in range(stages)] + [("B", s) for s in reversed(range(stages))]
    left = [list(way) for _ in range(count)]
    while any(left):
        m = draw.choice([m for m, rest in enumerate(left) if rest])
        op, stage = left[m].pop(0)
        rows[homes[stage][0]].append(Action(stage, op, m))
    made = Schedule("own", count, homes, tuple(map(tuple, rows)))
    pairs = [a for row in rows for a, b in pairwise(row) if (a.op, b.op) == ("F", "B")]
    together = replace(made, paired=frozenset(a for a in pairs if draw.random() < 0.5))
    try:
        # What two actions make leaves after both, and what they take comes before both.
        verify(together)
        verify(with_transfers(together))
    except ScheduleError:
        return made
    return together


def test_any_legal_order_runs_and_is_exact() -> None:
    """Whatever runs with asynchronous transfers runs with blocking ones."""
    paired = early = 0
    for seed in range(300):
        schedule = draw_schedule(seed)
        verify(schedule)
        count = check(schedule, random_times(schedule.n_stages, seed))
        early, paired = early + (count > 0), paired + bool(schedule.paired)
    assert early > 100 and paired > 50


def test_neighbours_exchange_at_once() -> None:
    """Stage 0 is ready to send at 2 and stage 1 at 4 + 3: a value of 2 ms and a gradient of 1 ms cross from there."""
    times = Times([1, 1], [2, 2], [0, 2], [0, 1], latency_ms=[0, 1], transfers="blocking")
    found = spans_of(generate("1F1B", 2, 2), times)
    # 0F0 ends at 1, and its value arrives 3 later; stage 0 is held until then.
    assert found["1F0"] == (4, 5) and found["0F1"] == (4, 5) and found["1B0"] == (5, 7)
    # Both have stopped at 7. Stage 0 and stage 1 wait for the value too, which arrives at 10.
    assert found["1F1"] == (10, 11) and found["0B0"] == (10, 12) and found["1B1"] == (11, 13)
    assert found["0B1"] == (15, 17)


def test_a_sender_waits_for_a_receiver_that_computes() -> None:
    """The first of two forwards of 1 ms waits 9 ms until the second stage is over with the one before."""
    found = spans_of(generate("GPipe", 2, 3), Times([1, 10], [1, 1], [0, 0], [0, 0], transfers="blocking"))
    assert [found[a][0] for a in ("0F0", "0F1", "0F2")] == [0, 1, 11] and found["1F2"] == (21, 31)


def test_hosts_wait_at_stops() -> None:
    """Stage 0 launches its backward only when its gradient has come; asynchronous, it has launched it before."""
    times = Times([1, 1], [2, 2], forward_launch_ms=[5, 0], backward_launch_ms=[7, 0])
    assert spans_of(generate("1F1B", 2, 1), times)["0B0"] == (8, 12)
    assert spans_of(generate("1F1B", 2, 1), replace(times, transfers="blocking"))["0B0"] == (8, 15)


def test_bad_transfers_are_named() -> None:
    schedule = generate("1F1B", 2, 1)
    with pytest.raises(ScheduleError, match="transfers='blocked': give asynchronous or blocking; did you mean 'block"):
        simulate(schedule, replace(Times.unit(2), transfers="blocked"))  # type: ignore[arg-type]
    blocking = replace(Times.unit(2), transfers="blocking")
    stuck = Schedule("own", 2, line(2), parse_rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    with pytest.raises(ScheduleError, match="own: device 0, position 2, 0RECV_B0: deadlock, it waits for 1SEND_B0"):
        simulate(stuck, blocking)
    lost = Schedule("own", 1, line(2), parse_rows("0F0 0SEND_F0", "1F0"))
    with pytest.raises(ScheduleError, match=r"own: device 1, position 0, 1F0: deadlock, it waits for 1RECV_F0"):
        simulate(lost, blocking)
    with pytest.raises(ScheduleError, match="own: 0SEND_F0 has no receive: verify the schedule"):
        simulate(replace(lost, actions=parse_rows("0F0 0SEND_F0", "")), blocking)
