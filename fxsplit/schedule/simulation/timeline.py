"""Timeline: what every device did when, predicted by a simulation or measured in a run.

Reports draw it: in the terminal, as a picture, and as a file for Perfetto.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.schedule.action import COMPUTES, FORWARD, SEND_B, SEND_F, Action
from fxsplit.schedule.simulation.memory import Course, find_peak
from fxsplit.schedule.simulation.simulate import Simulation, Trip
from fxsplit.system.figures import format_bytes
from fxsplit.system.shown import Parts, Shown, Table


class Span(NamedTuple):
    """One action, from when to when, in milliseconds from the start of the step."""

    action: Action
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """The spans of each device, in order of time.

    `memory` is what each device held, and `places` what part of the model it has, where that is known. `links` are
    names of links with their messages, which are written as the actions that send them; a measured timeline has none.
    """

    title: str
    devices: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[Course, ...] = ()
    links: tuple[tuple[str, tuple[Span, ...]], ...] = ()
    places: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        simulation: Simulation,
        devices: tuple[str, ...] = (),
        memory: tuple[Course, ...] = (),
        places: tuple[str, ...] = (),
    ) -> Timeline:
        """Return the timeline of a simulation; `devices` are names for it (default: device 0, device 1, ...).

        Transfers, sums and optimizer steps that take no time are left out, and so are links that nothing takes time on.
        Computing is kept even where it takes none.
        """
        schedule = simulation.schedule
        names = devices or tuple(f"device {d}" for d in range(schedule.n_devices))
        # A picture would draw a span without length as a line.
        spans = tuple(
            tuple(Span(a, *span) for a, span in zip(row, times, strict=True) if a.op in COMPUTES or span[0] < span[1])
            for row, times in zip(schedule.actions, simulation.spans, strict=True)
        )
        links = tuple(
            (f"{names[a]} > {names[b]}", tuple(_draw_trip(trip) for trip in simulation.trips[a, b]))
            for a, b in simulation.busy_links
        )
        return cls(schedule.name, names, spans, memory, links, places)

    def summarise(self) -> str:
        """Return which schedule this is of, how long it takes, and on how many devices."""
        return f"{self.title}, {self.length_ms:.3f} ms on {len(self.devices)} devices"

    def show(self) -> Parts:
        """Return a table of how busy each device is, and what it holds at most where that is known."""
        rows = []
        for number, (name, spans) in enumerate(zip(self.devices, self.spans, strict=True)):
            busy = sum(span.end_ms - span.begin_ms for span in spans if span.action.op in COMPUTES)
            idle = 1.0 - busy / self.length_ms if self.length_ms else 0.0
            # A timeline may know the memory of some devices only.
            peaks = [format_bytes(find_peak(course)) for course in self.memory[number : number + 1]] or ["-"]
            more = [*peaks * bool(self.memory), *self.places[number : number + 1]]
            rows.append((name, len(spans), f"{busy:.3f}", f"{100 * idle:.1f} %", *more))
        heads = [*[">memory"] * bool(self.memory), *["has"] * bool(self.places)]
        yield Table(("device", ">actions", ">computes ms", ">idle", *heads), rows)
        yield f"{self.title}: {self.length_ms:.3f} ms; fxsplit.report.draw shows when"

    @property
    def rows(self) -> list[tuple[str, tuple[Span, ...]]]:
        """What reports draw a row for: each device with its spans, and behind them each link with its messages."""
        return [*zip(self.devices, self.spans, strict=True), *self.links]

    @property
    def labels(self) -> list[str]:
        """What stands at each row: the device's name, with its part of the model in a second line, or the link's."""
        places = [f"\n{place}" for place in self.places] or [""] * len(self.devices)
        devices = [name + place for name, place in zip(self.devices, places, strict=True)]
        return [*devices, *(name for name, _ in self.links)]

    @property
    def length_ms(self) -> float:
        """When the last action ends."""
        # A device does one action after another, so its last span ends last.
        return max((row[-1].end_ms for row in self.spans if row), default=0.0)


def _draw_trip(trip: Trip) -> Span:
    """Return a message as the action that sends it, for the time that it is on its link."""
    made = trip.message.made
    op = SEND_F if made.op in (FORWARD, SEND_F) else SEND_B
    return Span(made._replace(op=op), trip.begin_ms, trip.end_ms)
