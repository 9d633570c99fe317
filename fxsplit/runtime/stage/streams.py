r"""Queue a device's work on streams of an accelerator; a CPU does the work at once. Both have the same interface.

    worker of gpu:0                                    worker of gpu:1
    stage stream   --[forward 0]--[forward 1]--...
    copy stream, out            \--[copy 0]--[copy 1]
    copy stream, in (on gpu:1)     [copy 0]--[copy 1]--token--> stage stream --[forward 0]--

An accelerator's worker has one stream for its stages. For each accelerator that it sends values to it has two more, one
at either end. So a copy waits neither for stages of the sender or receiver, nor for copies to other devices.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.tensors.sparse_layouts import count_bytes
from fxsplit.torch_internals.thread_modes import NO_CONTEXT

hand_over = accelerators.hand_over
"""Keeps accelerator memory that another thread allocated until this thread's current stream has read it."""
AHEAD = 0.01
"""How far a worker may run ahead of its accelerator, as a share of the accelerator's memory.

Memory of a value that two streams use is free only after the accelerator's last use, not the worker's. A worker that
ran ahead without limit would need memory for the values of all microbatches.
"""


class Instant(NamedTuple):
    """A moment on a device, in seconds of the host's clock.

    On an accelerator, also the event recorded at that moment.
    """

    device: torch.device
    seconds: float
    event: Any = None


class DeviceStream:
    """A queue of work on one device. This base class is for a CPU: work is done when the call returns.

    A *token* marks a place in a stream; on a CPU it is None.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter(self) -> AbstractContextManager[None]:
        """Return a context in which work goes to this stream."""
        return NO_CONTEXT

    def mark(self) -> Any:
        """Return a token for everything queued so far."""

    def wait_for(self, token: Any) -> None:
        """Make later work of this stream wait for the place in a stream that `token` marks (None: do not wait)."""
        if token is not None:
            token.synchronize()

    def record_time(self) -> Any:
        """Return the time at which this stream reaches this place: seconds on a CPU, an event on an accelerator."""
        return time.perf_counter()

    def wait_for_instant(self) -> Instant:
        """Wait until the device has done everything queued so far, and return that moment."""
        return Instant(self.device, time.perf_counter())

    def send(self, values: Sequence[Any], to: torch.device) -> tuple[list[Any], Any]:
        """Return values for a worker on device `to`, and the token after which they are ready.

        A CPU hands its values over as they are.
        """
        return list(values), None

    def receive(self, values: Sequence[Any], token: Any = None) -> list[Any]:
        """Return values on this device that another thread made. Later work of this stream waits for the token.

        Values that are not tensors, or are on this device already, are returned as they are. Their memory is not reused
        before this stream has read them.
        """
        if token is not None:
            self.wait_for(token)
        return [v.cpu() if isinstance(v, Tensor) and v.device.type != "cpu" else v for v in values]


class AcceleratorStream(DeviceStream):
    """The streams of one worker on an accelerator. Each worker has its own, so several workers may overlap."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = accelerators.make_stream(device)
        self._copy_streams: dict[torch.device, list[torch.Stream]] = {}
        # Values received, the oldest first: the token before their use, and their bytes.
        self._received: deque[tuple[Any, int]] = deque()
        self._received_bytes = 0
        self._most_bytes = AHEAD * accelerators.count_memory_bytes(device)

    def enter(self) -> AbstractContextManager[None]:
        """Queue the block's work on this stream."""
        return accelerators.use_stream(self._stream)

    def mark(self) -> Any:
        """Return an event recorded on this stream."""
        return self._stream.record_event()

    def wait_for(self, token: Any) -> None:
        """Make this stream wait for an event; the calling thread goes on."""
        if token is not None:
            self._stream.wait_event(token)

    def record_time(self) -> Any:
        """Return an event that records the time at which the accelerator reaches this place."""
        event = accelerators.make_timer(self.device)
        event.record(self._stream)
        return event

    def wait_for_instant(self) -> Instant:
        """Return this moment, after the accelerator has done everything queued so far."""
        event = self.record_time()
        event.synchronize()
        return Instant(self.device, time.perf_counter(), event)

    def send(self, values: Sequence[Any], to: torch.device) -> tuple[list[Any], Any]:
        """Return values for a worker on a device. For another device they are copied, on the copy streams."""
        here = self.mark()
        if to == self.device:
            return list(values), here
        *into, out = self._find_copy_streams(to)
        out.wait_event(here)
        try:
            # A copy is queued on the current streams of both devices. A copy to a CPU has only this one.
            for stream in (*into, out):
                accelerators.set_current_stream(stream)
            copied = [v.to(to, non_blocking=True) if isinstance(v, Tensor) else v for v in values]
        finally:
            accelerators.set_current_stream(self._stream)
        _keep_until_read(values, out)
        return copied, (*into, out)[0].record_event()

    def receive(self, values: Sequence[Any], token: Any = None) -> list[Any]:
        """Return values on this device.

        Values from a CPU are copied; another accelerator's worker has copied its values.
        """
        self._stay_near()
        self.wait_for(token)
        hand_over(values)
        found = [move(v, self.device) if isinstance(v, Tensor) else v for v in values]
        size = sum(count_bytes(v) for v in found if isinstance(v, Tensor))
        self._received.append((self.mark(), size))
        self._received_bytes += size
        return found

    def _find_copy_streams(self, to: torch.device) -> list[torch.Stream]:
        """Return the streams for copies to a device: one on the other device, if it is an accelerator, and one here."""
        if to not in self._copy_streams:
            ends = [to, self.device] if accelerators.is_accelerator(to) else [self.device]
            self._copy_streams[to] = [accelerators.make_stream(device) for device in ends]
        return self._copy_streams[to]

    def _stay_near(self) -> None:
        """Wait until this thread is not too far ahead of the accelerator; see `AHEAD`."""
        while self._received:
            token, size = self._received[0]
            if not token.query():
                if self._received_bytes <= self._most_bytes:
                    return
                token.synchronize()
            self._received.popleft()
            self._received_bytes -= size


def make_stream(device: torch.device) -> DeviceStream:
    """Return a stream for one worker's device."""
    return AcceleratorStream(device) if accelerators.is_accelerator(device) else DeviceStream(device)


def mark_caller(devices: Iterable[torch.device]) -> list[Any]:
    """Return, for each accelerator among `devices`, a token for the work that the calling thread has queued there.

    The workers wait for it, since the caller may still be computing the batch.
    """
    return [accelerators.find_current_stream(d).record_event() for d in _list_accelerators(devices)]


def make_caller_wait(devices: Iterable[torch.device], tokens: Sequence[Any]) -> None:
    """Make the calling thread's streams on all of `devices` wait for all tokens."""
    # Every stream waits for every token: the caller's next work on one device may read a copy from another device.
    for stream in map(accelerators.find_current_stream, _list_accelerators(devices)):
        for token in tokens:
            if token is not None:
                stream.wait_event(token)


def join_caller(devices: Iterable[torch.device]) -> list[Any]:
    """Make the calling thread's streams on `devices` wait for each other. Returns a token for each stream."""
    found = list(dict.fromkeys(devices))
    tokens = mark_caller(found)
    make_caller_wait(found, tokens)
    return tokens


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, copied on the calling thread's current streams unless it is there already.

    The host waits only for a copy into its own memory.
    """
    if tensor.device == device:
        return tensor
    if not accelerators.is_accelerator(device):
        return tensor.to(device)
    return accelerators.pin(tensor).to(device, non_blocking=True)


def _keep_until_read(values: Iterable[Any], stream: torch.Stream) -> None:
    """Keep the memory of values on a stream's device until the stream has read it."""
    for value in values:
        if isinstance(value, Tensor) and value.device == stream.device:
            accelerators.keep_until_read(value, stream)


def _list_accelerators(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return the accelerators among devices, each once."""
    return [device for device in dict.fromkeys(devices) if accelerators.is_accelerator(device)]
