"""Queue a device's work: on a stream of a GPU, or nowhere on a CPU, so that no other room asks which it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.thread_modes import NO_CONTEXT


class Stream:
    """A queue of work on one device; this one is a CPU's, which needs none: work is over when the call returns.

    A *token* marks a place in a stream; on a CPU it is None.
    """

    def enter(self) -> AbstractContextManager[None]:
        """Return a context manager inside which work goes to this stream."""
        return NO_CONTEXT

    def mark(self) -> Any:
        """Return a token for everything queued so far."""

    def wait_for(self, token: Any) -> None:
        """Let what is queued from now on wait for the place that a token, of any stream, marks."""
        if token is not None:
            token.synchronize()

    def record_time(self) -> Any:
        """Return the time at which this stream gets here: in seconds, or an event that will know the time."""
        return time.perf_counter()

    def fetch(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the values on this device. Their memory is not given back before this stream has read it.

        Values that are no tensors, or are here already, are returned as they are.
        """
        return [v.cpu() if isinstance(v, Tensor) and v.device.type != "cpu" else v for v in tensors]


class CudaStream(Stream):
    """A CUDA stream of its own, so that stages on one GPU overlap too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Queue the block's work on this stream."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Return an event recorded on this stream."""
        return self._stream.record_event()

    def wait_for(self, token: Any) -> None:
        """Make this stream wait for an event; the calling thread goes on."""
        if token is not None:
            self._stream.wait_event(token)

    def record_time(self) -> Any:
        """Return an event that will know when the GPU got here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def fetch(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the values on this device, copied asynchronously."""
        hand_over(tensors)
        return [v.to(self._device, non_blocking=True) if isinstance(v, Tensor) else v for v in tensors]


def make_stream(device: torch.device) -> Stream:
    """Return a stream for one worker's device."""
    return CudaStream(device) if device.type == "cuda" else Stream()


def mark_caller(devices: Sequence[torch.device]) -> list[Any]:
    """Return, for each GPU among `devices`, a token for what the calling thread has queued there.

    The workers wait for it, since the caller may still be computing the batch.
    """
    return [torch.cuda.current_stream(d).record_event() for d in set(devices) if d.type == "cuda"]


def make_caller_wait(marks: Sequence[tuple[torch.device, Any]]) -> None:
    """Let the calling thread's streams wait for the workers' tokens."""
    for device, token in marks:
        if token is not None:
            torch.cuda.current_stream(device).wait_event(token)


def hand_over(values: Sequence[Any]) -> None:
    """Keep GPU memory that another thread allocated until this thread's current stream has read it."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type == "cuda":
            # The allocator gives memory back to the stream that made it, as soon as Python drops the tensor.
            value.record_stream(torch.cuda.current_stream(value.device))
