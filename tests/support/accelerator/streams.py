"""Streams and events of the made-up accelerator, in place of `torch_internals/tensors/accelerators.py`."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch import Tensor

from tests.support.accelerator.devices import find_device, toys
from tests.support.accelerator.record import Clock, Record

MEMORY_BYTES = 1 << 36
KERNEL_MS = 0.01
"""The time of each kernel, as events measure it."""


class Event:
    """A point in a stream, once recorded. Only a wait of the host proves that a device has reached it."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._clock: Clock = {}
        self._kernels = 0

    def record(self, stream: Stream) -> None:
        with self._record.lock:
            self._clock = dict(self._record.clocks[stream.name])
            self._kernels = self._clock.get(stream.name, 0)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        with self._record.lock:
            self._record.note_wait("Event.synchronize")
            self._record.synchronize(self._clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: Event) -> float:
        return KERNEL_MS * (other._kernels - self._kernels)


class Stream:
    """A queue of work on one device. Two objects with one name are the same stream."""

    def __init__(self, record: Record, device: torch.device, name: str) -> None:
        self.device, self.name, self._record = device, name, record

    def record_event(self, event: Event | None = None) -> Event:
        found = Event(self._record) if event is None else event
        found.record(self)
        return found

    def wait_event(self, event: Event) -> None:
        with self._record.lock:
            clock = self._record.clocks[self.name]
            for name, number in event._clock.items():
                clock[name] = max(clock.get(name, 0), number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Stream({self.name})"


class Driver:
    """A stand-in for the accelerator's driver: the functions of `accelerators`, by the same names."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._numbers = itertools.count()
        self._current = threading.local()

    def make_stream(self, device: torch.device) -> Stream:
        # The number is left out of messages, so that a mistake reads the same in two runs.
        return Stream(self._record, find_device(device), f"{find_device(device)} stream#{next(self._numbers)}")

    def make_event(self, device: torch.device) -> Event:
        return Event(self._record)

    make_timer = make_event

    def find_current_stream(self, device: torch.device | None = None) -> Stream:
        found = find_device(device)
        return Stream(self._record, found, getattr(self._current, str(found), f"{found} default"))

    def set_current_stream(self, stream: Stream) -> None:
        setattr(self._current, str(stream.device), stream.name)
        toys.set_device(stream.device)

    def keep_until_read(self, tensor: Tensor, stream: Stream) -> None:
        block: Any = getattr(tensor, "block", None)
        if block is not None:
            with self._record.lock:
                block.kept.add(stream.name)

    def synchronize(self, device: torch.device) -> None:
        with self._record.lock:
            self._record.note_wait("synchronize")
            self._record.finish(str(find_device(device)))

    def release_cached_memory(self) -> None:
        """Nothing is cached."""

    def count_memory_bytes(self, device: torch.device) -> int:
        return MEMORY_BYTES
