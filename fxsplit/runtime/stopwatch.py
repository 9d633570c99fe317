"""Measure when each action of one job began and ended, by each device's own clock."""

from __future__ import annotations

from typing import Any

import torch

from fxsplit.runtime.streams import Stream
from fxsplit.schedule.action import Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.timeline import Span, Timeline


class Stopwatch:
    """Collects times while workers run a schedule. Each worker writes the row of its own device, so no lock is needed.

    An action begins when what it waits for has arrived. On a GPU that is when the GPU itself begins, which may be long
    after its worker has queued the action.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._rows: list[list[tuple[Action, Any, Any]]] = [[] for _ in schedule.actions]
        self._starts: list[Any] = [None] * schedule.n_devices
        self._begins: list[Any] = [None] * schedule.n_devices

    def start(self, device: int, stream: Stream) -> None:
        """Start the clock of the device with this number."""
        self._starts[device] = stream.record_time()

    def begin(self, device: int, stream: Stream) -> None:
        """Note that a device begins an action. Called again when a message has arrived, it replaces the first time."""
        self._begins[device] = stream.record_time()

    def end(self, device: int, stream: Stream, action: Action) -> None:
        """Note that a device has ended the action that it began last."""
        self._rows[device].append((action, self._begins[device], stream.record_time()))

    def make_timeline(self, devices: tuple[str, ...]) -> Timeline:
        """Return the times in milliseconds from the first device's start; `devices` are the names of the devices."""
        # Events know their times only when the GPU has passed them.
        if any(not isinstance(start, float) for start in self._starts):
            torch.cuda.synchronize()
        first = min((start for start in self._starts if isinstance(start, float)), default=0.0)
        offsets = [_measure_ms(first, start) for start in self._starts]
        rows = (
            tuple(Span(a, offset + _measure_ms(start, b), offset + _measure_ms(start, e)) for a, b, e in row)
            for row, start, offset in zip(self._rows, self._starts, offsets, strict=True)
        )
        return Timeline(f"{self.schedule.name}, measured", devices, tuple(rows))


def _measure_ms(earlier: Any, later: Any) -> float:
    """Return the milliseconds between two times of one clock: seconds of a CPU, or events of a GPU.

    Times of different kinds cannot be compared, and count as the same moment.
    """
    if isinstance(earlier, float) != isinstance(later, float):
        return 0.0
    return 1000.0 * (later - earlier) if isinstance(earlier, float) else float(earlier.elapsed_time(later))
