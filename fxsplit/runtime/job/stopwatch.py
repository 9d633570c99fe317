"""Measure when each action of one job began and ended, by the clock of the action's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fxsplit.runtime.stage.streams import DeviceStream, Instant
from fxsplit.schedule.action import Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.simulation.timeline import Span, Timeline


class Stopwatch:
    """Collects the times of actions while workers run a schedule.

    Each worker writes only the times of its own device, so no lock is needed. An action begins when its inputs have
    arrived. On an accelerator, the action begins when the accelerator starts to compute, perhaps long after the worker
    has queued the action.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._rows: list[list[tuple[Action, Any, Any]]] = [[] for _ in schedule.actions]
        self._starts: list[Instant | None] = [None] * schedule.n_devices
        self._begins: list[Any] = [None] * schedule.n_devices

    def start(self, device: int, stream: DeviceStream) -> None:
        """Start the clock of device number `device`."""
        # A CUDA event gives only the time to another event. So wait for one event, and read the host's clock then.
        self._starts[device] = stream.wait_for_instant()

    def begin(self, device: int, stream: DeviceStream) -> None:
        """Note that a device begins an action. A second call, after a message has arrived, replaces the first time."""
        self._begins[device] = stream.record_time()

    def end(self, device: int, stream: DeviceStream, action: Action) -> None:
        """Note that a device has ended the action that it began last."""
        self._rows[device].append((action, self._begins[device], stream.record_time()))

    def make_timeline(self, devices: tuple[str, ...]) -> Timeline:
        """Return the begin and end of each action, in milliseconds since the first device started.

        devices: the names of the devices.
        """
        starts = [start for start in self._starts if start is not None]
        first = min((start.seconds for start in starts), default=0.0)
        # Workers on one accelerator share its clock, which is more exact than the host's.
        clocks = {start.device: start for start in reversed(starts)}
        rows = []
        for row, start in zip(self._rows, self._starts, strict=True):
            clock = clocks.get(start.device) if start is not None else None
            rows.append(tuple(Span(a, _measure_ms(first, clock, b), _measure_ms(first, clock, e)) for a, b, e in row))
        return Timeline(f"{self.schedule.name}, measured", devices, tuple(rows))


class Timing:
    """Times the jobs of one training batch: a step, or a forward and a backward.

    is_timed: whether to time them. Otherwise only the end of the batch is told.
    tell: is called with the stopwatches after the last job.
    """

    def __init__(self, tell: Callable[[Sequence[Stopwatch]], None], *, is_timed: bool) -> None:
        self._tell = tell
        self._is_timed = is_timed
        self._watches: list[Stopwatch] = []

    def start(self, schedule: Schedule) -> Stopwatch | None:
        """Return the stopwatch of a job that runs a schedule; None if it is not timed."""
        if not self._is_timed:
            return None
        self._watches.append(Stopwatch(schedule))
        return self._watches[-1]

    def end(self) -> None:
        """Tell that the last job has ended."""
        self._tell(self._watches)


def _measure_ms(first: float, clock: Instant | None, time: Any) -> float:
    """Return the milliseconds from `first`, in seconds of the host's clock, to `time`.

    time: seconds of the host's clock, or an event of an accelerator.
    clock: for an event, a moment that is known both as an event and in seconds of the host's clock.
    """
    if isinstance(time, float) or clock is None:
        return float(1000.0 * (time - first))
    time.synchronize()
    return 1000.0 * (clock.seconds - first) + float(clock.event.elapsed_time(time))
