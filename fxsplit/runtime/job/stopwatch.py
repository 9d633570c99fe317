"""Measure when each action of one job began and ended, by each device's own clock."""

from __future__ import annotations

from typing import Any

from fxsplit.runtime.stage.streams import DeviceStream, Instant
from fxsplit.schedule.action import Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.simulation.timeline import Span, Timeline


class Stopwatch:
    """Collect times while workers run a schedule. Each worker writes its own device's row, so no lock is needed.

    An action begins when its inputs have arrived. On an accelerator it begins when the accelerator itself begins, which
    may be long after its worker has queued the action.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._rows: list[list[tuple[Action, Any, Any]]] = [[] for _ in schedule.actions]
        self._starts: list[Instant | None] = [None] * schedule.n_devices
        self._begins: list[Any] = [None] * schedule.n_devices

    def start(self, device: int, stream: DeviceStream) -> None:
        """Start the clock of the device with this number."""
        # An event knows only the time to another event. After a wait for it, the host's clock gives its moment.
        self._starts[device] = stream.wait_for_instant()

    def begin(self, device: int, stream: DeviceStream) -> None:
        """Note that a device begins an action. A second call, after a message has arrived, replaces the first time."""
        self._begins[device] = stream.record_time()

    def end(self, device: int, stream: DeviceStream, action: Action) -> None:
        """Note that a device has ended the action that it began last."""
        self._rows[device].append((action, self._begins[device], stream.record_time()))

    def make_timeline(self, devices: tuple[str, ...]) -> Timeline:
        """Return the times in milliseconds from the first device's start; `devices` are the names of the devices."""
        starts = [start for start in self._starts if start is not None]
        first = min((start.seconds for start in starts), default=0.0)
        # Workers on one accelerator share its clock, which is more exact than the host's.
        clocks = {start.device: start for start in reversed(starts)}
        rows = []
        for row, start in zip(self._rows, self._starts, strict=True):
            clock = clocks.get(start.device) if start is not None else None
            rows.append(tuple(Span(a, _measure_ms(first, clock, b), _measure_ms(first, clock, e)) for a, b, e in row))
        return Timeline(f"{self.schedule.name}, measured", devices, tuple(rows))


def _measure_ms(first: float, clock: Instant | None, time: Any) -> float:
    """Return the milliseconds from `first`, in seconds of the host's clock, to a time on a device.

    The time is also in seconds, or an event whose distance from `clock`'s event is known once both have passed.
    """
    if isinstance(time, float) or clock is None:
        return float(1000.0 * (time - first))
    time.synchronize()
    return 1000.0 * (clock.seconds - first) + float(clock.event.elapsed_time(time))
