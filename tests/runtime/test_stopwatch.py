"""Times of actions, by clocks that tick when they are asked."""

from __future__ import annotations

from typing import Any

from fxsplit.runtime.stopwatch import Stopwatch
from fxsplit.schedule import Action, generate


class Clock:
    """A stream whose time is set by hand, in seconds."""

    def __init__(self) -> None:
        self.now: Any = 0.0

    def record_time(self) -> Any:
        return self.now


class Event:
    """As a CUDA event, which tells times between events alone, in milliseconds."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


def run(watch: Stopwatch, device: int, times: list[Any]) -> None:
    """Start, begin, begin again after a wait, end: one action of a device."""
    clock: Any = Clock()
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


def test_clocks_of_different_kinds_start_together(monkeypatch: Any) -> None:
    synchronized: list[bool] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: synchronized.append(True))
    watch = Stopwatch(generate("GPipe", 2, 1))
    run(watch, 0, [3.0, 3.0, 3.0, 4.0])
    assert not synchronized
    run(watch, 1, [Event(70.0), Event(71.0), Event(72.0), Event(75.0)])
    spans = watch.make_timeline(("cpu:0", "cuda:0")).spans
    assert synchronized == [True], "events know their times only then"
    assert [(s.begin_ms, s.end_ms) for row in spans for s in row] == [(0.0, 1000.0), (2.0, 5.0)]
