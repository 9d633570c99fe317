"""Watch: when each action of one job began and ended, by each device's own clock."""

from __future__ import annotations

from typing import Any

import torch

from fxsplit.runtime.streams import Stream
from fxsplit.schedule.action import Action
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.timeline import Span, Timeline


class Stopwatch:
    """Collects times while workers run a schedule; each worker writes its own row.

    An action begins when what it waits for has arrived. On a GPU that is when the GPU itself begins and ends.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._rows: list[list[tuple[Action, Any, Any]]] = [[] for _ in schedule.actions]
        self._starts: list[Any] = [None] * schedule.n_devices
        self._begins: list[Any] = [None] * schedule.n_devices

    def start(self, device: int, stream: Stream) -> None:
        """Start a device's clock."""
        self._starts[device] = stream.record_time()

    def begin(self, device: int, stream: Stream) -> None:
        """Note that a device begins an action, or goes on after it has waited."""
        self._begins[device] = stream.record_time()

    def end(self, device: int, stream: Stream, action: Action) -> None:
        """Note that a device has ended the action that it began last."""
        self._rows[device].append((action, self._begins[device], stream.record_time()))

    def make_timeline(self, devices: tuple[str, ...]) -> Timeline:
        """Return what was seen, in milliseconds from the first device's start."""
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
    """Return the milliseconds between two ticks of one clock; those of different kinds count as the same moment."""
    if isinstance(earlier, float) != isinstance(later, float):
        return 0.0
    return 1000.0 * (later - earlier) if isinstance(earlier, float) else float(earlier.elapsed_time(later))
