"""Read values from an accelerator on the host without waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor

from fxsplit.torch_internals.tensors import accelerators

T = TypeVar("T")

MOST_COMING = 8
"""How many copies may be under way at a time. A host that is further ahead of its accelerator starts no more."""


class HostCopy:
    """An asynchronous copy of a small tensor to host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        self._value = tensor.detach()
        if not accelerators.is_on_host(tensor):
            self._value = self._value.to("cpu", non_blocking=True)
            self._event = accelerators.find_current_stream(tensor.device).record_event()

    @property
    def is_there(self) -> bool:
        """Whether the copy has arrived, so that reading it does not block."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Return the copy. Blocks until it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


class PendingCopies(Generic[T]):
    """A queue of copies under way, the oldest first. The caller attaches an object to each copy."""

    def __init__(self, most: int = MOST_COMING) -> None:
        self._copies: deque[tuple[HostCopy, T]] = deque()
        self._most = most

    @property
    def is_full(self) -> bool:
        """Whether no more copies should be started."""
        return len(self._copies) >= self._most

    def add(self, tensor: Tensor, about: T) -> None:
        """Start to copy a tensor to the host. `about`: an object to return with the copy."""
        self._copies.append((HostCopy(tensor), about))

    def take_arrived(self) -> Iterator[tuple[Tensor, T]]:
        """Yield and remove the copies that have arrived, oldest first, up to the first that has not."""
        while self._copies and self._copies[0][0].is_there:
            copy, about = self._copies.popleft()
            yield copy.read(), about
