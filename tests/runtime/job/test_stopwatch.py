"""Times of actions, by clocks that the test sets."""

from __future__ import annotations

from typing import Any

import torch

from fxsplit.runtime.job.stopwatch import Stopwatch
from fxsplit.runtime.stage.streams import Instant
from fxsplit.schedule import Action, generate

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Clock:
    """A stream with a time that is set by hand, in seconds, or as an event that the host saw at `seconds`."""

    def __init__(self, device: torch.device = CPU, seconds: float = 0.0) -> None:
        self.device = device
        self.seconds = seconds
        self.now: Any = 0.0

    def record_time(self) -> Any:
        return self.now

    def wait_for_instant(self) -> Instant:
        event = self.now if isinstance(self.now, Event) else None
        return Instant(self.device, self.seconds if event else self.now, event)


class Event:
    """Like an accelerator's event: after a wait for it, it gives the milliseconds to another event."""

    def __init__(self, ms: float) -> None:
        self.ms = ms
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Event) -> float:
        assert later.waited, "an event knows its time only then"
        return later.ms - self.ms


def run(watch: Stopwatch, device: int, times: list[Any], clock: Any = None) -> None:
    """Start, begin, begin again after a wait, end: one action of a device."""
    clock = clock or Clock()
    clock.now = times[0]
    watch.start(device, clock)
    for now in times[1:3]:
        clock.now = now
        watch.begin(device, clock)
    clock.now = times[3]
    watch.end(device, clock, Action(device, "F", 0))


def test_times_count_from_the_first_start() -> None:
    watch = Stopwatch(generate("GPipe", 2, 1))
    run(watch, 0, [10.0, 10.5, 11.0, 12.0])
    run(watch, 1, [10.25, 10.25, 12.0, 12.5])
    timeline = watch.make_timeline(("a", "b"))
    assert timeline.title == "GPipe, measured" and timeline.devices == ("a", "b")
    assert timeline.spans == (((Action(0, "F", 0), 1000.0, 2000.0),), ((Action(1, "F", 0), 2000.0, 2500.0),))


def test_the_host_tells_when_an_accelerator_starts() -> None:
    watch = Stopwatch(generate("GPipe", 2, 1))
    run(watch, 0, [3.0, 3.0, 3.0, 4.0])
    run(watch, 1, [Event(70.0), Event(71.0), Event(72.0), Event(75.0)], Clock(GPU, 3.5))
    spans = watch.make_timeline(("cpu:0", "cuda:0")).spans
    assert [(s.begin_ms, s.end_ms) for row in spans for s in row] == [(0.0, 1000.0), (502.0, 505.0)]


def test_workers_on_one_accelerator_share_its_clock() -> None:
    """The host recorded the second start 5 ms late, and that time is not used."""
    watch = Stopwatch(generate("GPipe", 2, 1))
    run(watch, 0, [Event(70.0), Event(71.0), Event(72.0), Event(75.0)], Clock(GPU, 3.0))
    run(watch, 1, [Event(71.0), Event(75.0), Event(75.0), Event(77.0)], Clock(GPU, 3.006))
    spans = watch.make_timeline(("cuda:0#0", "cuda:0#1")).spans
    assert [(s.begin_ms, s.end_ms) for row in spans for s in row] == [(2.0, 5.0), (5.0, 7.0)]
