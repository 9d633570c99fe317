"""Errors of values that an accelerator alone knows: raised in a later batch, so that no batch waits for it."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.ir.facts.counts import MOST_COMING
from fxsplit.torch_internals.host_copies import HostCopy, is_on_host


class LateErrors:
    """What may have gone wrong in batches that the host has queued, and is told of once it is known."""

    def __init__(self) -> None:
        self._coming: deque[tuple[HostCopy, str]] = deque()

    def expect(self, wrong: Tensor, message: str) -> None:
        """Raise InputError with a message if a flag is set: at once where the host can read it, or in a later batch."""
        if is_on_host(wrong):
            if wrong:
                raise InputError(message)
        # Of a host that is far ahead nothing more is asked.
        elif len(self._coming) < MOST_COMING:
            self._coming.append((HostCopy(wrong), message))

    def raise_arrived(self) -> None:
        """Raise InputError if something was wrong in an earlier batch, as far as the host can know without waiting."""
        while self._coming and self._coming[0][0].is_there:
            copy, message = self._coming.popleft()
            if copy.read():
                raise InputError(f"in an earlier batch, which the accelerator has computed by now: {message}")
