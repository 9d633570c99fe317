"""Timeline: what every device did when, predicted or measured; what pictures are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.schedule.action import COMPUTES, Action
from fxsplit.schedule.memory import Course
from fxsplit.schedule.simulate import Simulation


class Span(NamedTuple):
    """One action, from when to when, in milliseconds from the step's start."""

    action: Action
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """Spans by device, in order; `memory` is what each device held, where that is known."""

    title: str
    devices: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[Course, ...] = ()

    @classmethod
    def of(cls, simulation: Simulation, devices: tuple[str, ...] = (), memory: tuple[Course, ...] = ()) -> Timeline:
        """Return the timeline of a simulation; what takes no time is left out."""
        schedule = simulation.schedule
        names = devices or tuple(f"device {d}" for d in range(schedule.n_devices))
        spans = tuple(
            tuple(Span(a, *span) for a, span in zip(row, times, strict=True) if a.op in COMPUTES or span[0] < span[1])
            for row, times in zip(schedule.actions, simulation.spans, strict=True)
        )
        return cls(schedule.name, names, spans, memory)

    @property
    def length_ms(self) -> float:
        """When the last action ends."""
        return max((row[-1].end_ms for row in self.spans if row), default=0.0)
