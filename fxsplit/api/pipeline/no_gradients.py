"""Calls whose outputs carry no gradients, whatever the caller's mode is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fxsplit.torch_internals.thread_modes import keep_modes
from fxsplit.torch_internals.user_lines import warn_user


@contextmanager
def give_no_gradients(model: nn.Module, reason: str | None = None) -> Iterator[None]:
    """Switch gradients off in the block; with a `reason`, warn where the caller may count on them."""
    if reason is not None and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        warn_user(f"the outputs of this pipeline carry no gradients, as it is {reason}: call it under torch.no_grad()")
    with keep_modes():
        torch.set_grad_enabled(False)
        yield
