"""Snapshots: what a stage keeps of a buffer for backward must outlive the next microbatch's write to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxsplit.observe import storage_id


@contextmanager
def copied(buffers: frozenset[int], outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> Iterator[None]:
    """Let autograd keep copies of what shares memory with `buffers`; `outer` are the caller's own hooks.

    In an unsplit loop each microbatch's backward is over before the next one's forward writes.
    """
    if not buffers:
        yield
        return
    pack, unpack = outer or (lambda t: t, lambda t: t)

    def copy(tensor: Tensor) -> Any:
        return pack(tensor.clone() if storage_id(tensor) in buffers else tensor)

    with saved_tensors_hooks(copy, unpack):
        yield
