"""Streams, events and memory of an accelerator, of whichever kind: the one place where fxsplit meets its driver.

An *accelerator* is any device but the CPU. torch has one interface to all kinds, `torch.accelerator`. A *stream* is a
queue of work on one device. Each thread has a current stream on each device, to which its work goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.scopes.undo import restore_after


def is_accelerator(device: torch.device) -> bool:
    """Return whether work on a device is queued, to be done some time after the call that asks for it."""
    return device.type not in ("cpu", "meta")


def is_present(device: torch.device) -> bool:
    """Return whether this process has devices of the same kind."""
    if not is_accelerator(device):
        return True
    kind = torch.accelerator.current_accelerator(check_available=True)
    return kind is not None and kind.type == device.type


def make_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of a device."""
    return torch.Stream(device)


def make_timer(device: torch.device) -> torch.Event:
    """Return an event that, once recorded and passed, knows when."""
    return torch.Event(device, enable_timing=True)


def find_current_stream(device: torch.device | None = None) -> torch.Stream:
    """Return the calling thread's current stream on a device, by default on its current device."""
    return torch.accelerator.current_stream(device)


def set_current_stream(stream: torch.Stream) -> None:
    """Make a stream the calling thread's current one on its device, and that device the current one."""
    torch.accelerator.set_stream(stream)


@contextmanager
def use_stream(stream: torch.Stream) -> Iterator[None]:
    """Let the calling thread queue the block's work on a stream, and make its device the current one."""
    # The device that is current, and the stream that is current on the stream's own device.
    outside, before = find_current_stream(), find_current_stream(stream.device)
    with restore_after(partial(set_current_stream, outside)), restore_after(partial(set_current_stream, before)):
        set_current_stream(stream)
        yield


def keep_until_read(tensor: Tensor, stream: torch.Stream) -> None:
    """Keep a tensor's memory, once the tensor is gone, until a stream is past all that it has queued by then.

    The allocator knows by itself only the stream that the memory was allocated on.
    """
    tensor.record_stream(stream)


def hand_over(values: Iterable[Any]) -> None:
    """Keep memory of accelerators that another thread allocated until this thread's current stream has read it."""
    for value in values:
        if isinstance(value, Tensor) and is_accelerator(value.device):
            keep_until_read(value, find_current_stream(value.device))


def pin(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor of host memory where an accelerator can read it by itself, and any other as it is.

    A copy from other memory lets the host wait until the stream that the copy is queued on is through with all else.
    """
    if tensor.device.type != "cpu":
        return tensor
    # Some kinds of tensors and of devices know no such memory: their copies are right, only slower.
    with suppress(RuntimeError):
        if not tensor.is_pinned():
            return tensor.pin_memory()
        # Its owner may fill it with the next batch before the accelerator has come to read it.
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor


def count_memory_bytes(device: torch.device) -> int:
    """Return how much memory a device has."""
    return int(torch.accelerator.get_memory_info(device)[1])


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was queued on it, on all of its streams."""
    torch.accelerator.synchronize(device)


def release_cached_memory() -> None:
    """Give back the memory that the allocator keeps for later, where nothing uses it.

    It keeps memory for the stream that it was allocated on, and no other stream can have it.
    """
    torch.accelerator.empty_cache()


def occupy(device: torch.device, cycles: int) -> None:
    """Let a device's current stream do nothing for so many cycles of the device's clock; 2e6 are about a millisecond.

    Does nothing on an accelerator that torch has no such kernel for.
    """
    # There is no public way to make a kernel of a known length.
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def describe(device: torch.device) -> dict[str, str]:
    """Return what an accelerator is called, what it can do, and how fast its clock is, as far as torch can tell.

    The clock is that of the moment, and is told only where NVIDIA's management library is installed. Of other kinds of
    devices nothing is known.
    """
    if device.type != "cuda":
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    found = {"device": torch.cuda.get_device_name(device), "capability": f"compute capability {major}.{minor}"}
    # The library may be missing, or refuse: then the clock is simply not known.
    with suppress(Exception):
        found["clock"] = f"{torch.cuda.clock_rate(device)} MHz"
    return found
