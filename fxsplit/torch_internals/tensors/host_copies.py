"""Numbers of an accelerator that the host wants to know without waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor

from fxsplit.torch_internals.tensors import accelerators

T = TypeVar("T")

MOST_COMING = 8
"""So many answers are awaited at a time: a host that is far ahead of its accelerator asks no more."""


class HostCopy:
    """A copy of a small tensor in host memory, which is there once the accelerator has come so far."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        self._value = tensor.detach()
        if not is_on_host(tensor):
            self._value = self._value.to("cpu", non_blocking=True)
            self._event = accelerators.find_current_stream(tensor.device).record_event()

    @property
    def is_there(self) -> bool:
        """Whether the copy can be read without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Return the copy; waits for the accelerator where it is not there yet."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


class PendingCopies(Generic[T]):
    """Copies that are under way, the oldest first, each with what it is about."""

    def __init__(self, most: int = MOST_COMING) -> None:
        self._copies: deque[tuple[HostCopy, T]] = deque()
        self._most = most

    @property
    def is_full(self) -> bool:
        """Whether no more should be asked."""
        return len(self._copies) >= self._most

    def add(self, tensor: Tensor, about: T) -> None:
        """Begin to copy a tensor."""
        self._copies.append((HostCopy(tensor), about))

    def take_arrived(self) -> Iterator[tuple[Tensor, T]]:
        """Yield those that are there by now, up to the first one that is not, and forget them."""
        while self._copies and self._copies[0][0].is_there:
            copy, about = self._copies.popleft()
            yield copy.read(), about


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for an accelerator."""
    return not accelerators.is_accelerator(tensor.device)
