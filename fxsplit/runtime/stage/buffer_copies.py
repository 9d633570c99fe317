"""Keep what a stage's backward needs of a buffer from the next microbatch's write to it.

In an unsplit loop each microbatch's backward is over before the next one's forward writes to the buffer. In a pipeline
several forwards come first, so autograd saves copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxsplit.torch_internals.fx.interpret import describe_tensor, get_storage_id


@contextmanager
def save_buffer_copies(
    buffers: frozenset[int], outer: tuple[Callable[..., Any], Callable[..., Any]] | None
) -> Iterator[None]:
    """Let autograd save copies of tensors that share memory with `buffers`, for the block.

    `buffers` has storage ids (see `get_storage_id`). `outer` are the caller's own pack and unpack hooks, if any: they
    get the copies. The unpacking of a tensor raises RuntimeError where the stage itself has changed it in place since.
    """
    if not buffers:
        yield
        return
    # An output that is saved knows its node, which would know the output: memory of a graph that no backward frees, and
    # that Python does not see. A detached tensor knows no node.
    pack, unpack = outer or (Tensor.detach, lambda t: t)

    def keep(tensor: Tensor) -> tuple[Any, Tensor, int]:
        kept = tensor.clone() if get_storage_id(tensor) in buffers else tensor
        packed = pack(kept)
        # A detached tensor shares the version counter, so it tells of later writes.
        return packed, packed if outer is None else torch.empty(0), kept._version

    def give(packed: tuple[Any, Tensor, int]) -> Any:
        inner, witness, version = packed
        # Autograd itself looks at versions only where there are no hooks, and so only where the caller has none either.
        if outer is None and witness._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{describe_tensor(witness)} is at version {witness._version}; expected version {version} instead"
            )
        return unpack(inner)

    with saved_tensors_hooks(keep, give):
        yield


def clone_outputs(values: tuple[Any, ...], buffers: frozenset[int]) -> tuple[Any, ...]:
    """Return a stage's outputs, with copies of those that share memory with `buffers`.

    The next microbatch writes there, maybe before the next stage has read the outputs.
    """
    if not buffers:
        return values
    return tuple(v.clone() if isinstance(v, Tensor) and get_storage_id(v) in buffers else v for v in values)
