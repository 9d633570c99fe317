"""Timeline: the actions of every device over time, simulated or measured.

Reports draw it in the terminal, as a picture, and as a file for Perfetto.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxsplit.schedule.action import COMPUTES, FORWARD, SEND_B, SEND_F, Action
from fxsplit.schedule.simulation.memory import MemoryTrace, find_peak
from fxsplit.schedule.simulation.simulate import Simulation, Trip
from fxsplit.system.figures import format_bytes
from fxsplit.system.imports import import_above
from fxsplit.system.shown import Parts, Shown, Table


class Span(NamedTuple):
    """One action; times in ms from the start of the step."""

    action: Action
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """The spans of each device, in order of time.

    `memory` is the memory of each device over time, and `places` the part of the model on it, if known. `links` are
    names of links with their messages; each message is written as its send action. A measured timeline has no links.
    """

    title: str
    devices: tuple[str, ...]
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[MemoryTrace, ...] = ()
    links: tuple[tuple[str, tuple[Span, ...]], ...] = ()
    places: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        simulation: Simulation,
        devices: tuple[str, ...] = (),
        memory: tuple[MemoryTrace, ...] = (),
        places: tuple[str, ...] = (),
    ) -> Timeline:
        """Return the timeline of a simulation. `devices` are display names (default: device 0, device 1, ...).

        Transfers, reductions and optimizer steps without time are omitted, and so are links without busy time. Compute
        actions stay even if they take no time.
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
        """Return the title, the length in ms and the number of devices."""
        return f"{self.title}, {self.length_ms:.3f} ms on {len(self.devices)} devices"

    def show(self) -> Parts:
        """Yield a table with each device's busy time, idle share and peak memory, if known."""
        rows = []
        for number, (name, spans) in enumerate(zip(self.devices, self.spans, strict=True)):
            busy = sum(span.end_ms - span.begin_ms for span in spans if span.action.op in COMPUTES)
            idle = 1.0 - busy / self.length_ms if self.length_ms else 0.0
            # Some timelines have the memory of only some devices.
            peaks = [format_bytes(find_peak(trace)) for trace in self.memory[number : number + 1]] or ["-"]
            more = [*peaks * bool(self.memory), *self.places[number : number + 1]]
            rows.append((name, len(spans), f"{busy:.3f}", f"{100 * idle:.1f} %", *more))
        heads = [*[">memory"] * bool(self.memory), *["has"] * bool(self.places)]
        yield Table(("device", ">actions", ">computes ms", ">idle", *heads), rows)
        yield f"{self.title}: {self.length_ms:.3f} ms; fxsplit.report.draw shows when"

    def embed(self) -> str:
        """Return the timeline as a picture, as HTML for notebooks."""
        return str(import_above("report.picture").embed_timelines([self]))

    @property
    def rows(self) -> list[tuple[str, tuple[Span, ...]]]:
        """The rows of a drawing: each device with its spans, then each link with its messages."""
        return [*zip(self.devices, self.spans, strict=True), *self.links]

    @property
    def labels(self) -> list[str]:
        """The label of each row: a device's name, with its part of the model on a second line, or a link's name."""
        places = [f"\n{place}" for place in self.places] or [""] * len(self.devices)
        devices = [name + place for name, place in zip(self.devices, places, strict=True)]
        return [*devices, *(name for name, _ in self.links)]

    @property
    def length_ms(self) -> float:
        """The end of the last action, in ms."""
        # Actions of a device do not overlap, so its last span ends last.
        return max((row[-1].end_ms for row in self.spans if row), default=0.0)

    @property
    def bubble(self) -> float:
        """The idle share of the step, from 0 to 1, averaged over devices."""
        whole = self.length_ms * len(self.devices)
        return 1.0 - sum(span.end_ms - span.begin_ms for row in self.spans for span in row) / whole if whole else 0.0


def _draw_trip(trip: Trip) -> Span:
    """Return a message as its send action, for its time on the link."""
    made = trip.message.made
    op = SEND_F if made.op in (FORWARD, SEND_F) else SEND_B
    return Span(made._replace(op=op), trip.begin_ms, trip.end_ms)
