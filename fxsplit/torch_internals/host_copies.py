"""Numbers of an accelerator that the host wants to know without waiting for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxsplit.torch_internals import accelerators


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


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for an accelerator."""
    return not accelerators.is_accelerator(tensor.device)
