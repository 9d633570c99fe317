"""Timeline: what every device did when, predicted by a simulation or measured in a run.

Reports draw it: in the terminal, as a picture, and as a file for Perfetto.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.schedule.action import COMPUTES, Action
from fxsplit.schedule.memory import Course
from fxsplit.schedule.simulate import Simulation


class Span(NamedTuple):
    """One action, from when to when, in milliseconds from the start of the step."""

    action: Action
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each device, in order of time; `memory` is what each device held, where that is known."""

    title: str
    devices: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[Course, ...] = ()

    @classmethod
    def of(cls, simulation: Simulation, devices: tuple[str, ...] = (), memory: tuple[Course, ...] = ()) -> Timeline:
        """Return the timeline of a simulation; `devices` are names for it (default: device 0, device 1, ...).

        Transfers, sums and optimizer steps that take no time are left out. Computing is kept even where it takes none.
        """
        schedule = simulation.schedule
        names = devices or tuple(f"device {d}" for d in range(schedule.n_devices))
        # A picture would draw a span without length as a line.
        spans = tuple(
            tuple(Span(a, *span) for a, span in zip(row, times, strict=True) if a.op in COMPUTES or span[0] < span[1])
            for row, times in zip(schedule.actions, simulation.spans, strict=True)
        )
        return cls(schedule.name, names, spans, memory)

    @property
    def length_ms(self) -> float:
        """When the last action ends."""
        # A device does one action after another, so its last span ends last.
        return max((row[-1].end_ms for row in self.spans if row), default=0.0)
