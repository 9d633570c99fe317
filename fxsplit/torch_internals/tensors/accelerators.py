"""Streams, events and memory of accelerators of any type. Only this file calls an accelerator's driver interface.

An *accelerator* is any device but the CPU. torch has one interface to all types, `torch.accelerator`. A *stream* is a
queue of work on one device. Each thread has a current stream on each device, which receives its work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors.sparse_layouts import list_parts

HOST = ("cpu", "meta")
"""Types of devices whose work is done when the call returns."""


def is_accelerator(device: torch.device) -> bool:
    """Return whether work on a device is queued and runs asynchronously."""
    return device.type not in HOST


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for an accelerator."""
    return tensor.device.type in HOST


def is_present(device: torch.device) -> bool:
    """Return whether this process has devices of the same type."""
    if not is_accelerator(device):
        return True
    kind = torch.accelerator.current_accelerator(check_available=True)
    return kind is not None and kind.type == device.type


def make_stream(device: torch.device) -> torch.Stream:
    """Make a new stream on a device."""
    return torch.Stream(device)


def make_timer(device: torch.device) -> torch.Event:
    """Make an event that records the time when its stream reaches it."""
    return torch.Event(device, enable_timing=True)


def find_current_stream(device: torch.device | None = None) -> torch.Stream:
    """Return the calling thread's current stream on a device, by default on its current device."""
    return torch.accelerator.current_stream(device)


def set_current_stream(stream: torch.Stream) -> None:
    """Make a stream current on its device in the calling thread, and make that device current."""
    torch.accelerator.set_stream(stream)


@contextmanager
def use_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream and its device current in the calling thread for the block."""
    # Save the current device with its stream, and the current stream of the stream's own device.
    outside, before = find_current_stream(), find_current_stream(stream.device)
    with restore_after(partial(set_current_stream, outside)), restore_after(partial(set_current_stream, before)):
        set_current_stream(stream)
        yield


def keep_until_read(tensor: Tensor, stream: torch.Stream) -> None:
    """Keep a tensor's memory allocated until `stream` has finished the work that is queued when the tensor is freed.

    torch's allocator itself watches only the stream on which the memory was allocated.
    """
    # torch records streams of strided tensors only.
    for part in list_parts(tensor):
        part.record_stream(stream)


def hand_over(values: Iterable[Any]) -> None:
    """Keep accelerator memory allocated by another thread until this thread's current stream has read it."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type not in HOST:
            keep_until_read(value, find_current_stream(value.device))


def pin(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in pinned host memory, from which an accelerator can read.

    Returns other tensors as they are.
    A copy from memory that is not pinned makes the host wait until the stream has finished all earlier work.
    """
    if tensor.device.type != "cpu":
        return tensor
    # Some types of tensors and devices do not support pinned memory. Their copies are correct, only slower.
    with suppress(RuntimeError):
        if not tensor.is_pinned():
            return tensor.pin_memory()
        # Copy anyway: the owner may overwrite it with the next batch before the accelerator reads it.
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor


def count_memory_bytes(device: torch.device) -> int:
    """Return the size of a device's memory, in bytes."""
    return int(torch.accelerator.get_memory_info(device)[1])


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work queued on all of its streams."""
    torch.accelerator.synchronize(device)


def release_cached_memory() -> None:
    """Return unused cached memory to the device.

    The allocator caches memory for the stream on which it was allocated, and other streams cannot use it.
    """
    torch.accelerator.empty_cache()


def occupy(device: torch.device, cycles: int) -> None:
    """Keep a device's current stream busy for a number of clock cycles; 2e6 cycles are about a millisecond.

    Does nothing on an accelerator for which torch has no such kernel.
    """
    # torch has no public kernel of a known duration.
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


def describe(device: torch.device) -> dict[str, str]:
    """Return the name, the compute capability and the clock rate of an NVIDIA GPU, if torch knows them.

    The clock rate is the current one, and needs NVIDIA's management library. Returns {} for other devices.
    """
    if device.type != "cuda":
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    found = {"device": torch.cuda.get_device_name(device), "capability": f"compute capability {major}.{minor}"}
    # The library may be missing or refuse. The clock rate is then left out.
    with suppress(Exception):
        found["clock"] = f"{torch.cuda.clock_rate(device)} MHz"
    return found
