"""Clocks: the time of a piece of work on its device, and the time its host takes to launch it.

On a CPU the work is done when the call returns. An accelerator works asynchronously: the wall clock would show the
launch, or, with a synchronisation after each node, the launch and the wait. So queue the work ahead:

    host    | busy kernel | event node 1 event | event node 2 event | ...     launches without waiting
    device  |============ busy ============|ev node 1 ev|ev node 2 ev| ...     then runs without gaps

While a dummy kernel keeps the accelerator busy, the host launches one node after another, with an event before and an
event after each. When the accelerator reaches the nodes, nothing holds it up between them, so the events give its own
time for each node. The wall clock around the launches gives the host's time.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median

import torch

from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.tensors.allocations import Allocations, count_allocations

PORTION = 64
"""How many nodes are queued at once. A GPU queues about 1,024 launches, including events; then the host must wait."""
EMPTY = 4
"""How often each portion first measures empty work, which shows the overhead of a measurement."""
SPARE_MS = 1.0
"""The dummy kernel runs for twice the host's time for a portion, plus this."""
CYCLES = 2_000_000
"""How many cycles the calibration runs the dummy kernel for: about one millisecond."""
MOST_SWEEPS = 8
"""The most sweeps that are run until times can be trusted. After these, times count even if they cannot.

A *sweep* is one run of the graph, forward and backward.
"""


@dataclass
class WorkTime:
    """The time of a piece of work: `device_ms` on its device, and `launch_ms` that its host takes to launch it.

    On a CPU `launch_ms` is 0. On an accelerator both are valid only after the end of the sweep. `calls`: how many calls
    of autograd the work contains.
    """

    device_ms: float
    launch_ms: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class Begin:
    """The beginning of a span that a clock measures: in ms on the wall clock, and as events on an accelerator."""

    ms: float
    events: tuple[torch.Event, torch.Event] | None = None


class Clock:
    """The wall clock, for a CPU."""

    queues = False
    """Whether the device takes its work from a queue. The times of the first sweeps then do not count."""

    def now(self) -> float:
        """Return milliseconds from an arbitrary start."""
        return time.perf_counter() * 1000.0

    def enter(self, name: str) -> None:
        """Announce that work of the node `name` follows. A node's forward and backward have different names."""

    def start(self) -> Begin:
        """Return the beginning of a span."""
        return Begin(self.now())

    def stop(self, begin: Begin, calls: int = 0) -> WorkTime:
        """Return the time from `begin` to now. The work contains `calls` calls of autograd.grad."""
        return WorkTime(self.now() - begin.ms)

    def end_sweep(self) -> bool:
        """Complete the times of a sweep, which is one run of the graph. Return whether they can be trusted."""
        return True

    def count_allocations(self) -> AbstractContextManager[Allocations]:
        """Count the memory that operators allocate in a block."""
        return count_allocations()


class AcceleratorClock(Clock):
    """The clock of an accelerator: events for the device, wall clock for the host, no wait inside a portion.

    A portion is a number of nodes that are queued together. The first two sweeps run without the dummy kernel: the
    first loads the kernels, which may take a second, and the second shows the host's time. Later sweeps check at each
    node whether the dummy kernel is still running. If it has ended, the previous node held up the host, perhaps because
    the queue was full: from then on that node begins a portion of its own. If this node holds up the host again, it
    waits for the device itself, as `nonzero` does. It is then measured without the dummy kernel, and its events include
    time without launches.

    The overhead of a measurement is subtracted. From each span of the device this is the distance of two events. From
    each span of the host it is an empty call of autograd for each call, because the runtime makes one call for a whole
    stage instead of one for each node. Other work of the measurement, such as cutting the graph between nodes, is
    outside of all spans.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = accelerators.find_current_stream(device)
        self._leaf = torch.zeros(1, device=device, requires_grad=True)
        self._seed = torch.ones(1, device=device)
        self._cycles_per_ms = self._find_cycles_per_ms()
        self._spans: list[tuple[WorkTime, torch.Event, torch.Event]] = []
        self._empty: list[WorkTime] = []
        self._calls_ms: list[float] = []
        # The time to keep the device busy for each portion; 0 in the first two sweeps.
        self._busy_ms = 0.0
        self._loaded = False
        self._longest_ms = 0.0
        self._trusted = True
        # Node that held up the host -> 1: it begins a portion, or 2: it is measured without the dummy kernel.
        self._apart: dict[str, int] = {}
        self._first: str | None = None
        self._last = ""
        self._count = 0
        self._begun_ms = 0.0
        self._busy: torch.Event | None = None

    def enter(self, name: str) -> None:
        """Announce that work of the node `name` follows. The node may begin a new portion."""
        self._look()
        alone = self._apart.get(self._last, 0) > 1
        if self._first is None or self._count >= PORTION or name in self._apart or alone:
            self._end_portion()
            self._begin_portion(name)
        self._last = name
        self._count += 1

    def start(self) -> Begin:
        """Return the beginning of a span."""
        # Create both events before the host's time begins.
        events = accelerators.make_timer(self._device), accelerators.make_timer(self._device)
        events[0].record(self._stream)
        return Begin(self.now(), events)

    def stop(self, begin: Begin, calls: int = 0) -> WorkTime:
        """Return the time from `begin` to now. It becomes valid at the end of the sweep."""
        span = WorkTime(0.0, self.now() - begin.ms, calls)
        assert begin.events is not None  # this clock's own start() created it
        first, last = begin.events
        last.record(self._stream)
        self._spans.append((span, first, last))
        return span

    def end_sweep(self) -> bool:
        """Wait for the device and complete all times. Return whether the host was ahead of the device all the time."""
        self._look()
        self._end_portion()
        for span, first, last in self._spans:
            span.device_ms = first.elapsed_time(last)
        empty_ms = median(span.device_ms for span in self._empty)
        call_ms = median(self._calls_ms)
        for span, _, _ in self._spans:
            span.device_ms = max(span.device_ms - empty_ms, 0.0)
            span.launch_ms = max(span.launch_ms - span.calls * call_ms, 0.0)
        trusted = self._trusted and self._busy_ms > 0.0
        self._busy_ms = 2.0 * self._longest_ms + SPARE_MS if self._loaded else 0.0
        self._longest_ms, self._trusted, self._loaded = 0.0, True, True
        self._spans, self._empty, self._calls_ms = [], [], []
        return trusted

    def _begin_portion(self, name: str) -> None:
        """Begin a portion with the node `name`: keep the device busy, and measure empty work."""
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
        """End a portion: wait until the device's queue is empty."""
        if self._first is None:
            return
        # If the host was held up, its time for the portion is not its own.
        if self._busy is not None or not self._busy_ms:
            self._longest_ms = max(self._longest_ms, self.now() - self._begun_ms)
        accelerators.synchronize(self._device)
        self._first, self._busy = None, None

    def _look(self) -> None:
        """Check whether the device is still busy. If not, note the last node: its portion was not queued ahead."""
        if self._busy is None or not self._busy.query():
            return
        self._apart[self._last] = 2 if self._last == self._first else 1
        self._trusted, self._busy = False, None
        # Without the dummy kernel, the portion's time includes waiting: start again from here.
        self._begun_ms = self.now()

    def _find_cycles_per_ms(self) -> float:
        """Return how many cycles of the dummy kernel take a millisecond."""
        first, last = accelerators.make_timer(self._device), accelerators.make_timer(self._device)
        # The first call loads the kernel and raises the clock frequency.
        accelerators.occupy(self._device, CYCLES)
        first.record(self._stream)
        accelerators.occupy(self._device, CYCLES)
        last.record(self._stream)
        accelerators.synchronize(self._device)
        return CYCLES / max(first.elapsed_time(last), 1e-3)


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device. On an accelerator, the work must go to the current stream."""
    return AcceleratorClock(device) if accelerators.is_accelerator(device) else Clock()


def call_autograd(leaf: torch.Tensor, seed: torch.Tensor) -> None:
    """Call autograd without work: the gradient of a leaf with respect to itself is the given gradient."""
    torch.autograd.grad([leaf], [leaf], [seed], allow_unused=True)
