"""Clocks: how long a piece of work takes on its device, and how long its host is busy with launching it.

A CPU has done the work when the call returns. An accelerator does it later: the wall clock would show the launch, or,
with a wait after each node, the launch and the wait. There a sweep is queued ahead instead. While the accelerator is
kept busy with a kernel that does nothing else, the host launches one node after the other without ever waiting, with an
event before and an event behind each. When the accelerator gets to the nodes, nothing holds it up between them, so the
events tell its own time of each. The wall clock around the launches tells the host's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from fxsplit.torch_internals.tensors import accelerators

PORTION = 64
"""Nodes that are queued at once. A GPU takes about 1,024 launches, with the events; then the host has to wait."""
EMPTY = 4
"""Measurements of no work at all, at the beginning of each portion: the least that a measurement shows."""
SPARE_MS = 1.0
"""The accelerator is kept busy for twice as long as the host took for a portion, and for this long besides."""
CYCLES = 2_000_000
"""Cycles of the kernel that tells how many cycles a millisecond has: about one millisecond."""
MOST_SWEEPS = 8
"""Sweeps after which the portions are taken as they are."""


@dataclass
class Span:
    """What a piece of work took: `device_ms` on its device, and `launch_ms` of its host, which is 0 on a CPU.

    On an accelerator both are known once the sweep has ended. `calls` is how many calls of autograd are in it.
    """

    device_ms: float
    launch_ms: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class Begin:
    """Where a span begins: on the wall clock, in milliseconds, and on an accelerator at an event."""

    ms: float
    events: tuple[torch.Event, torch.Event] | None = None


class Clock:
    """The wall clock, for a CPU."""

    queues = False
    """Whether work is queued, so that sweeps have to be settled before they count."""

    def now(self) -> float:
        """Return milliseconds from an arbitrary start."""
        return time.perf_counter() * 1000.0

    def enter(self, name: str) -> None:
        """Say that the node `name` comes next; a graph's forward and backward have names of their own."""

    def start(self) -> Begin:
        """Return the beginning of a span."""
        return Begin(self.now())

    def stop(self, begin: Begin, calls: int = 0) -> Span:
        """Return the span from `begin` to now, with so many calls of autograd.grad in it."""
        return Span(self.now() - begin.ms)

    def end_sweep(self) -> bool:
        """Make the spans of a sweep known, and return whether they can be trusted."""
        return True


class AcceleratorClock(Clock):
    """The clock of an accelerator: events for the device, the wall clock for the host, no wait inside of a portion.

    The first sweep is queued without a busy accelerator: it loads the kernels, and tells how long the host takes. Later
    ones are checked at each node: if the busy kernel has ended by then, the host has waited, because it was held up by
    the node before. That node begins a portion of its own from then on, since the queue may have been full. If the host
    is held up again, the node waits for the device by itself, as `nonzero` does: it is measured without the busy
    kernel, and what its events show includes the time in which nothing was launched.

    What no work at all shows is taken off: the distance of two events from each span of the device, and a call of
    autograd that finds nothing to do from each of the host's spans that has such calls. The runtime makes one call for
    a whole stage, and not one for each node. Other work of this measurement, such as cutting the graph between nodes,
    lies outside of all spans.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = accelerators.find_current_stream(device)
        self._leaf = torch.zeros(1, device=device, requires_grad=True)
        self._seed = torch.ones(1, device=device)
        self._cycles_per_ms = self._find_cycles_per_ms()
        self._spans: list[tuple[Span, torch.Event, torch.Event]] = []
        self._empty: list[Span] = []
        self._calls_ms: list[float] = []
        # How long the device is kept busy for each portion; nothing in the first sweep.
        self._busy_ms = 0.0
        self._longest_ms = 0.0
        self._trusted = False
        # Nodes that held the host up: 1 begins a portion, 2 is measured without the busy kernel.
        self._apart: dict[str, int] = {}
        self._first: str | None = None
        self._last = ""
        self._count = 0
        self._begun_ms = 0.0
        self._busy: torch.Event | None = None

    def enter(self, name: str) -> None:
        """Say that the node `name` comes next, which may begin a portion."""
        self._look()
        alone = self._apart.get(self._last, 0) > 1
        if self._first is None or self._count >= PORTION or name in self._apart or alone:
            self._end_portion()
            self._begin_portion(name)
        self._last = name
        self._count += 1

    def start(self) -> Begin:
        """Return the beginning of a span."""
        # Both events are made before the host's time begins.
        events = accelerators.make_timer(self._device), accelerators.make_timer(self._device)
        events[0].record(self._stream)
        return Begin(self.now(), events)

    def stop(self, begin: Begin, calls: int = 0) -> Span:
        """Return the span from `begin` to now, which is known at the end of the sweep."""
        span = Span(0.0, self.now() - begin.ms, calls)
        assert begin.events is not None  # this clock's own start() has made it
        first, last = begin.events
        last.record(self._stream)
        self._spans.append((span, first, last))
        return span

    def end_sweep(self) -> bool:
        """Wait for the device, make all spans known, and return whether the host was ahead throughout."""
        self._look()
        self._end_portion()
        for span, first, last in self._spans:
            span.device_ms = first.elapsed_time(last)
        empty_ms = median(span.device_ms for span in self._empty)
        call_ms = median(self._calls_ms)
        for span, _, _ in self._spans:
            span.device_ms = max(span.device_ms - empty_ms, 0.0)
            span.launch_ms = max(span.launch_ms - span.calls * call_ms, 0.0)
        trusted = self._trusted
        self._busy_ms = 2.0 * self._longest_ms + SPARE_MS
        self._longest_ms, self._trusted = 0.0, True
        self._spans, self._empty, self._calls_ms = [], [], []
        return trusted

    def _begin_portion(self, name: str) -> None:
        """Keep the device busy, and measure what no work shows."""
        self._first, self._count, self._busy = name, 0, None
        if self._busy_ms and self._apart.get(name, 0) < 2:
            accelerators.occupy(self._device, int(self._busy_ms * self._cycles_per_ms))
            self._busy = accelerators.make_timer(self._device)
            self._busy.record(self._stream)
        self._begun_ms = self.now()
        for _ in range(EMPTY):
            self._empty.append(self.stop(self.start()))
            begin = self.now()
            call_autograd(self._leaf, self._seed)
            self._calls_ms.append(self.now() - begin)

    def _end_portion(self) -> None:
        """Wait for the device, so that its queue is empty."""
        if self._first is None:
            return
        # A host that was held up says nothing of how long it takes by itself.
        if self._busy is not None or not self._busy_ms:
            self._longest_ms = max(self._longest_ms, self.now() - self._begun_ms)
        accelerators.synchronize(self._device)
        self._first, self._busy = None, None

    def _look(self) -> None:
        """Note the last node if the device is not busy any more: the rest of its portion is not queued ahead."""
        if self._busy is None or not self._busy.query():
            return
        self._apart[self._last] = 2 if self._last == self._first else 1
        self._trusted, self._busy = False, None
        # Without a busy kernel, this portion's time is that of a host that waits.
        self._begun_ms = self.now()

    def _find_cycles_per_ms(self) -> float:
        """Return how many cycles of the busy kernel take a millisecond."""
        first, last = accelerators.make_timer(self._device), accelerators.make_timer(self._device)
        # The first kernel is loaded, and the clock rises.
        accelerators.occupy(self._device, CYCLES)
        first.record(self._stream)
        accelerators.occupy(self._device, CYCLES)
        last.record(self._stream)
        accelerators.synchronize(self._device)
        return CYCLES / max(first.elapsed_time(last), 1e-3)


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device, whose accelerator's current stream is where the work will go."""
    return AcceleratorClock(device) if accelerators.is_accelerator(device) else Clock()


def call_autograd(leaf: torch.Tensor, seed: torch.Tensor) -> None:
    """Call autograd where there is nothing to do: the gradient of a leaf for itself is what one begins with."""
    torch.autograd.grad([leaf], [leaf], [seed], allow_unused=True)
