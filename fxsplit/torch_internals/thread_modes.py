"""What a thread does not inherit: grad mode, autocast, default device, hooks on saved tensors, context variables."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")
NO_CONTEXT = nullcontext()


@dataclass(frozen=True)
class ThreadModes:
    """The calling thread's modes, to be entered again in a worker."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    device: torch.device
    hooks: Any
    variables: contextvars.Context

    @classmethod
    def read(cls) -> ThreadModes:
        """Return the modes of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((d, torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d)),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=torch.get_default_device(),
            hooks=torch._C._autograd._top_saved_tensors_default_hooks(False),
            variables=contextvars.copy_context(),
        )

    @property
    def keeps_graph(self) -> bool:
        """Whether autograd records what runs in these modes."""
        return self.grad and not self.inference

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Enter the modes in this thread."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            else:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if self.hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            yield

    def leave_autocast(self) -> AbstractContextManager[Any]:
        """Return a context that leaves autocast for a backward, which a user's loop also runs outside of it."""
        if not self.autocast:
            return NO_CONTEXT
        stack = ExitStack()
        for device, _ in self.autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        return stack
