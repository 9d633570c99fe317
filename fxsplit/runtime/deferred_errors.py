"""Errors that only an accelerator can detect: raised in a later batch, so that no batch waits for the device."""

from __future__ import annotations

from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.torch_internals.tensors.host_copies import PendingCopies, is_on_host


class DeferredErrors:
    """Checks of queued batches. The host does not know their results yet."""

    def __init__(self) -> None:
        self._coming: PendingCopies[str] = PendingCopies()

    def expect(self, wrong: Tensor, message: str) -> None:
        """Raise InputError with `message` if the flag `wrong` is set: at once on the host, else in a later batch."""
        if is_on_host(wrong):
            if wrong:
                raise InputError(message)
        # If too many flags are on their way, this check is skipped.
        elif not self._coming.is_full:
            self._coming.add(wrong, message)

    def raise_arrived(self) -> None:
        """Raise InputError if a flag of an earlier batch has arrived and is set. Never waits."""
        for wrong, message in self._coming.take_arrived():
            if wrong:
                raise InputError(f"in an earlier batch, which the accelerator has computed by now: {message}")
