"""Snapshots: what a stage keeps of a buffer for backward must outlive the next microbatch's write to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxsplit.torch_internals.interpret import describe_tensor, get_storage_id


@contextmanager
def save_buffer_copies(
    buffers: frozenset[int], outer: tuple[Callable[..., Any], Callable[..., Any]] | None
) -> Iterator[None]:
    """Let autograd keep copies of what shares memory with `buffers`; `outer` are the caller's own hooks.

    In an unsplit loop each microbatch's backward is over before the next one's forward writes.
    """
    if not buffers:
        yield
        return
    pack, unpack = outer or (lambda t: t, lambda t: t)

    def keep(tensor: Tensor) -> tuple[Any, Tensor, int]:
        kept = tensor.clone() if get_storage_id(tensor) in buffers else tensor
        return pack(kept), kept.detach() if outer is None else torch.empty(0), kept._version

    def give(packed: tuple[Any, Tensor, int]) -> Any:
        inner, witness, version = packed
        if outer is None and witness._version != version:  # autograd itself looks only where there are no hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{describe_tensor(witness)} is at version {witness._version}; expected version {version} instead"
            )
        return unpack(inner)

    with saved_tensors_hooks(keep, give):
        yield


def clone_outputs(values: tuple[Any, ...], buffers: frozenset[int]) -> tuple[Any, ...]:
    """Return the values, with copies of those that share memory with `buffers`: the next microbatch writes there."""
    if not buffers:
        return values
    return tuple(v.clone() if isinstance(v, Tensor) and get_storage_id(v) in buffers else v for v in values)
