"""Links carry one message at a time: small steps by hand, and all schedules against an independent event simulation."""

from __future__ import annotations

import heapq
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import ScheduleError
from fxsplit.schedule import SCHEDULES, Action, Schedule, Times, generate, simulate
from fxsplit.schedule.flow import with_transfers
from fxsplit.schedule.generators.synchronous import run_forwards, schedule_replicas
from fxsplit.schedule.homes import line
from fxsplit.schedule.simulation.timeline import Timeline
from tests.support.graphs import try_examples


class World:
    """Devices and links as queues, moved by events in order of time; knows nothing of how `simulate` works.

    Whoever makes a value puts it on the link to whoever needs it. A link takes the first message of its queue whenever
    it is free, and delivers a message a latency after it is free again. A device starts the next action of its row as
    soon as all that the action needs has been delivered. It keeps the result of the first of a pair until the second is
    over.
    """

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule, self.times = schedule, times
        self.at = [0] * schedule.n_devices
        self.working = [False] * schedule.n_devices
        self.over: list[list[Action]] = [[] for _ in schedule.actions]
        self.delivered: set[tuple[str, int, int, int]] = set()
        self.links: dict[tuple[int, int], deque[tuple[float, float, Any]]] = {}
        self.carrying: set[tuple[int, int]] = set()
        self.events: list[tuple[float, int, Any]] = []
        self.count = 0
        self.spans: list[list[tuple[float, float]]] = [[] for _ in schedule.actions]

    def later(self, when: float, what: Any) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, what))

    def run(self) -> list[list[tuple[float, float]]]:
        self.start_devices(0.0)
        while self.events:
            now, _, (kind, *what) = heapq.heappop(self.events)
            if kind == "end":
                device, action = what
                self.working[device] = False
                self.over[device].append(action)
                if action not in self.schedule.paired:
                    for done in self.over[device]:
                        self.finish(now, device, done)
                    self.over[device] = []
            elif kind == "leaves":
                link, late, token = what
                self.carrying.discard(link)
                self.later(now + late, ("arrives", token))
                self.start_link(now, link)
            else:
                self.delivered.update(what)
            self.start_devices(now)
        return self.spans

    def start_devices(self, now: float) -> None:
        for device, row in enumerate(self.schedule.actions):
            if not self.working[device] and self.at[device] < len(row):
                action = row[self.at[device]]
                if all(token in self.delivered for token in self.wants(device, action)):
                    self.at[device] += 1
                    self.working[device] = True
                    self.spans[device].append((now, now + self.times.of(action)))
                    self.later(now + self.times.of(action), ("end", device, action))

    def wants(self, device: int, action: Action) -> list[tuple[str, int, int, int]]:
        """Return the inputs that must be on a device: values of the previous stage, gradients of the next, all sums."""
        stage, op, m = action.stage, action.op, action.microbatch
        last = self.schedule.n_stages - 1
        if op == "F":
            return [("value", stage - 1, m, device)] if stage else []
        if op in ("B", "I"):
            return [("gradient", stage + 1, m, device)] if stage < last else []
        if op == "REDUCE":
            return [("ended", stage, m, -1) for m in range(self.schedule.n_microbatches)]
        return []

    def finish(self, now: float, device: int, action: Action) -> None:
        stage, op, m = action.stage, action.op, action.microbatch
        if op in ("B", "W"):
            self.delivered.add(("ended", stage, m, -1))
        way = {"F": ("value", 1, stage + 1), "B": ("gradient", -1, stage), "I": ("gradient", -1, stage)}.get(op)
        if way is None or not 0 <= stage + way[1] < self.schedule.n_stages:
            return
        kind, step, boundary = way
        (target,) = {
            d
            for d, row in enumerate(self.schedule.actions)
            for a in row
            if (a.stage, a.microbatch) == (stage + step, m) and a.op in ("F", "B", "I")
        }
        token = (kind, stage, m, target)
        if target == device:
            self.delivered.add(token)
            return
        hops = self.times.forward_hop_ms if kind == "value" else self.times.backward_hop_ms
        link = (device, target)
        self.links.setdefault(link, deque()).append((hops[boundary], self.times.latency_ms[boundary], token))
        self.start_link(now, link)

    def start_link(self, now: float, link: tuple[int, int]) -> None:
        if link not in self.carrying and self.links[link]:
            takes, late, token = self.links[link].popleft()
            self.carrying.add(link)
            self.later(now + takes, ("leaves", link, late, token))


def random_times(stages: int, seed: int) -> Times:
    """Return random times in whole milliseconds, which add up exactly; some are 0."""
    draw = random.Random(seed)
    lists = [[float(draw.randint(0, most)) for _ in range(stages)] for most in (9, 18, 40, 40, 5, 30)]
    weight = [float(draw.randint(0, int(whole))) for whole in lists[1]]
    forward, backward, there, back, reduce, latency = lists
    return Times(forward, backward, there, back, reduce, weight_ms=weight, latency_ms=latency)


def check(schedule: Schedule, times: Times) -> None:
    """Compare all spans with the event simulation's, also with transfers written out."""
    expected = World(schedule, times).run()
    found = simulate(schedule, times)
    assert [list(row) for row in found.spans] == expected
    assert simulate(with_transfers(schedule), times).step_ms == found.step_ms
    for trips in found.trips.values():
        ends = [0.0, *(trip.end_ms for trip in trips)]
        assert all(trip.begin_ms >= end for trip, end in zip(trips, ends, strict=False)), "one message at a time"


@try_examples(60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 9), st.integers(0, 10**6))
def test_all_schedules_are_exact(name: str, devices: int, microbatches: int, seed: int) -> None:
    try:
        schedule = generate(name, devices, microbatches)
    except ScheduleError:
        return
    check(schedule, random_times(schedule.n_stages, seed))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize("homes", [((0,), (1, 2, 3), (4,)), ((0, 1), (2,)), ((0, 1), (2, 3))])
def test_links_of_replicas_are_their_own(name: str, homes: tuple[tuple[int, ...], ...]) -> None:
    """Each pair of devices has its own link: a message to one replica does not wait for a message to another."""
    for seed in range(20):
        schedule = schedule_replicas(name, homes, 7, [7] * len(homes))
        check(schedule, random_times(len(homes), seed))


def test_forwards_without_training() -> None:
    for seed in range(20):
        check(run_forwards(line(3), 6), random_times(3, seed))


def test_a_busy_link_holds_the_step_up() -> None:
    """F 5 and B 10 on two stages, 55 ms for a value and nothing back: the eighth value arrives after 8 x 55 ms."""
    times = Times([5, 5], [10, 10], [0, 55], [0, 0])
    found = simulate(generate("GPipe", 2, 8), times)
    # The first value leaves at 5, and the eighth arrives at 445. Then stage 1 runs a forward and eight backwards, and
    # stage 0 the last backward.
    assert found.step_ms == 5 + 8 * 55 + 5 + 8 * 10 + 10
    assert [(trip.begin_ms, trip.end_ms) for trip in found.trips[0, 1]] == [(5 + 55 * i, 60 + 55 * i) for i in range(8)]
    assert found.busy_links == {(0, 1): 8 * 55 / found.step_ms}


def test_a_latency_delays_messages_and_leaves_the_link_free() -> None:
    """Three values of 2 ms leave one after the other, and each arrives 30 ms later: the latency passes once."""
    found = simulate(generate("GPipe", 2, 3), Times([1, 1], [1, 1], [0, 2], [0, 2], latency_ms=[99, 30]))
    assert [(t.begin_ms, t.end_ms, t.arrive_ms) for t in found.trips[0, 1]] == [(1, 3, 33), (3, 5, 35), (5, 7, 37)]
    assert list(found.spans[1]) == [(33, 34), (35, 36), (37, 38), (38, 39), (39, 40), (40, 41)]
    # The first of three gradients is made at 39.
    assert found.step_ms == 39 + 3 * 2 + 30 + 1
    assert found.busy_links == {(0, 1): 6 / found.step_ms, (1, 0): 6 / found.step_ms}


def test_a_latency_applies_only_between_devices() -> None:
    """Stages 1 and 2 of ZBVZeroBubble are on one device."""
    schedule = generate("ZBVZeroBubble", 2, 4)
    plain, late = (simulate(schedule, Times([1] * 4, [2] * 4, latency_ms=ms)) for ms in ((), [50, 0, 50, 0]))
    assert late.spans == plain.spans
    with pytest.raises(ScheduleError, match="ZBVZeroBubble has 4 stages, and latency_ms has 3 times"):
        simulate(schedule, Times([1] * 4, [2] * 4, latency_ms=[0, 1, 1]))


def test_values_and_gradients_pass_each_other() -> None:
    """The way back is a link of its own: under 1F1B a gradient of 30 ms does not wait for a value of 30 ms."""
    found = simulate(generate("1F1B", 2, 2), Times([1, 1], [2, 2], [0, 30], [0, 30]))
    values, gradients = ([(t.begin_ms, t.end_ms) for t in found.trips[link]] for link in ((0, 1), (1, 0)))
    assert values == [(1, 31), (31, 61)] and gradients == [(34, 64), (64, 94)]


def test_two_stages_of_a_device_share_its_link() -> None:
    """Down the line and back: device 0 sends values of stage 0 and gradients of stage 3 to device 1 on one link."""
    found = simulate(generate("ZBVZeroBubble", 2, 4), Times([1] * 4, [2] * 4, [0, 7, 0, 7], [0, 7, 0, 7]))
    assert {trip.message.made.stage for trip in found.trips[0, 1]} == {0, 3}
    assert len(found.trips[0, 1]) == 8


def test_timelines_have_a_row_for_each_link_that_takes_time() -> None:
    simulation = simulate(generate("1F1B", 2, 1), Times([1, 1], [2, 2], [0, 3], [0, 0]))
    timeline = Timeline.of(simulation, ("a", "b"))
    assert [(name, [(str(s.action), s.begin_ms, s.end_ms) for s in spans]) for name, spans in timeline.links] == [
        ("a > b", [("0SEND_F0", 1, 4)])
    ]
    assert [name for name, _ in timeline.rows] == ["a", "b", "a > b"]
    assert Timeline.of(simulate(generate("1F1B", 2, 1), Times.unit(2))).links == ()
