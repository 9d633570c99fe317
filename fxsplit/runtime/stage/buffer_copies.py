"""Save copies of buffers that a stage's backward needs and that the next microbatch's forward overwrites.

An unsplit loop runs each microbatch's backward before the next forward writes to the buffer. In a pipeline several
forwards come first, so autograd must save copies.
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
    """Let autograd save copies of tensors that share memory with `buffers`, inside the block.

    buffers: storage ids (see `get_storage_id`).
    outer: the caller's own pack and unpack hooks, which get the copies (None: there are none).
    Unpacking a tensor raises RuntimeError if the stage itself has changed the tensor in place since it was saved.
    """
    if not buffers:
        yield
        return
    # An output saved as it is would hold its node, and the node the output: a circle that Python's collector cannot
    # see, and that leaks if no backward frees the graph. A detached tensor has no node.
    pack, unpack = outer or (Tensor.detach, lambda t: t)

    def keep(tensor: Tensor) -> tuple[Any, Tensor, int]:
        kept = tensor.clone() if get_storage_id(tensor) in buffers else tensor
        packed = pack(kept)
        # A detached tensor shares the version counter, so later writes show.
        return packed, packed if outer is None else torch.empty(0), kept._version

    def give(packed: tuple[Any, Tensor, int]) -> Any:
        inner, witness, version = packed
        # Autograd checks versions only if there are no saved-tensor hooks. So this checks only if the caller has none.
        if outer is None and witness._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{describe_tensor(witness)} is at version {witness._version}; expected version {version} instead"
            )
        return unpack(inner)

    with saved_tensors_hooks(keep, give):
        yield


def clone_outputs(values: tuple[Any, ...], buffers: frozenset[int]) -> tuple[Any, ...]:
    """Return a stage's outputs, with copies of tensors that share memory with `buffers`.

    The next microbatch may write to that memory before the next stage has read the outputs.
    """
    if not buffers:
        return values
    return tuple(v.clone() if isinstance(v, Tensor) and get_storage_id(v) in buffers else v for v in values)
