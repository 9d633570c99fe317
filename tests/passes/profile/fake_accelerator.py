"""A fake accelerator with two clocks: the test states the times of kernels on one and of launches on the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fxsplit.passes.profile import clock, time_alone, time_in_step
from fxsplit.torch_internals.tensors import accelerators

EVENT_MS, CALL_MS = 0.002, 0.03
"""The time of an event on the device, and of a call of autograd on the host."""
CYCLES_PER_MS = 1.7e6


class Accelerator:
    """A device that runs kernels one after the other, and a host that waits only if the device's queue is full."""

    def __init__(self, depth: int = 1024, call_ms: float = 0.0, load_ms: float = 0.0) -> None:
        """`call_ms`: the host's time for a call of autograd, beyond an empty one; `load_ms`: for a first launch."""
        self.host_ms = self.free_ms = self.occupied_ms = 0.0
        self.call_ms, self.load_ms = call_ms, load_ms
        self.waits = 0
        self._depth = depth
        self._ends: deque[float] = deque()

    def launch(self, kernel_ms: float) -> float:
        """Queue a kernel, and return when it will end; the host waits while the queue is full."""
        while self._ends and self._ends[0] <= self.host_ms:
            self._ends.popleft()
        if len(self._ends) >= self._depth:
            self.host_ms = self._ends.popleft()
        self.free_ms = max(self.free_ms, self.host_ms) + kernel_ms
        self._ends.append(self.free_ms)
        return self.free_ms

    def work(self, kernels: tuple[float, ...], launch_ms: float) -> None:
        """Launch some kernels within `host_ms` of the host, which is also busy without kernels."""
        for kernel_ms in kernels:
            self.host_ms += launch_ms / len(kernels)
            self.launch(kernel_ms)
        self.host_ms += 0.0 if kernels else launch_ms

    def synchronize(self, _device: object = None) -> None:
        """Let the host wait for the device."""
        self.waits += 1
        self.host_ms = max(self.host_ms, self.free_ms)

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """Let every profile be measured on this accelerator, though its tensors are the CPU's."""

        grad = torch.autograd.grad

        def call_autograd(*_tensors: Tensor) -> None:
            self.host_ms += CALL_MS

        def run_autograd(*args: Any, **options: Any) -> Any:
            self.host_ms += CALL_MS + self.call_ms
            return grad(*args, **options)

        def occupy(_device: object, cycles: int) -> None:
            self.occupied_ms += cycles / CYCLES_PER_MS
            self.launch(cycles / CYCLES_PER_MS)

        with ExitStack() as stack:
            for name, stand_in in {
                "find_current_stream": lambda _device: None,
                "make_timer": lambda _device: Event(self),
                "occupy": occupy,
                "synchronize": self.synchronize,
            }.items():
                stack.enter_context(patch.object(accelerators, name, stand_in))
            for module in (time_in_step, time_alone):
                stack.enter_context(patch.object(module, "make_clock", clock.AcceleratorClock))
            stack.enter_context(patch.object(clock, "call_autograd", call_autograd))
            stack.enter_context(patch.object(torch.autograd, "grad", run_autograd))
            stack.enter_context(patch.object(clock.Clock, "now", lambda _clock: self.host_ms))
            yield


class Event:
    """A point in the queue of a made-up accelerator."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self.ms = 0.0

    def record(self, _stream: object) -> None:
        """Queue the event."""
        self.ms = self._device.launch(EVENT_MS)

    def query(self) -> bool:
        """Return whether the device is past the event."""
        return self.ms <= self._device.host_ms

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds from this event to another event."""
        assert self.query() and other.query(), "the events have not been waited for"
        return other.ms - self.ms


class Operator:
    """An operator that hands its input on, and takes so long: its kernels and their launch, forward and backward."""

    def __init__(
        self,
        device: Accelerator,
        forward: tuple[tuple[float, ...], float],
        backward: tuple[tuple[float, ...], float],
        waits: bool = False,
    ) -> None:
        self.device, self.forward, self.backward, self.waits = device, forward, backward, waits
        self.__name__ = "operator"
        self.is_loaded = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return a copy of `x`; `waits`: after waiting for the device, as `nonzero` does."""
        return _Run.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Run(torch.autograd.Function):
    """Runs an operator's kernels on its accelerator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: Operator) -> Tensor:
        ctx.operator = operator
        operator.device.host_ms += 0.0 if operator.is_loaded else operator.device.load_ms
        operator.is_loaded = True
        operator.device.work(*operator.forward)
        if operator.waits:
            operator.device.synchronize()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.operator.device.work(*ctx.operator.backward)
        return gradients[0], None
