"""Errors of values that an accelerator alone knows: raised in a later batch, so that no batch waits for it."""

from __future__ import annotations

from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.torch_internals.tensors.host_copies import PendingCopies, is_on_host


class DeferredErrors:
    """What may have gone wrong in batches that the host has queued, and is told of once it is known."""

    def __init__(self) -> None:
        self._coming: PendingCopies[str] = PendingCopies()

    def expect(self, wrong: Tensor, message: str) -> None:
        """Raise InputError with a message if a flag is set: at once where the host can read it, or in a later batch."""
        if is_on_host(wrong):
            if wrong:
                raise InputError(message)
        # Of a host that is far ahead nothing more is asked.
        elif not self._coming.is_full:
            self._coming.add(wrong, message)

    def raise_arrived(self) -> None:
        """Raise InputError if something was wrong in an earlier batch, as far as the host can know without waiting."""
        for wrong, message in self._coming.take_arrived():
            if wrong:
                raise InputError(f"in an earlier batch, which the accelerator has computed by now: {message}")
