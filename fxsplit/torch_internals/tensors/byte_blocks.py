"""Blocks of bytes: several small tensors in one message, in the order of their memory, with strides kept.

A tensor of a block has memory of the block, and a count of writes of its own: a write to one of them is none to others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNED = 16
"""Every tensor of a block begins at a multiple of so many bytes."""


class TensorLayout(NamedTuple):
    """How a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self.numel * self.dtype.itemsize


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory without holes, whatever the order of its dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def is_row_major(part: TensorLayout) -> bool:
    """Return whether a tensor lies in memory as torch makes one of its shape."""
    expected, strides = 1, []
    for length in reversed(part.shape):
        strides.append(expected)
        expected *= length
    return part.strides == tuple(reversed(strides))


def place(parts: Sequence[TensorLayout]) -> tuple[list[int], int]:
    """Return where each part begins in a block, in bytes, and how long the block is."""
    places, end = [], 0
    for part in parts:
        places.append(end)
        end += part.nbytes + -part.nbytes % ALIGNED
    return places, end


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of memory, as a view of one dimension."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def make_view(block: Tensor, part: TensorLayout, begin: int) -> Tensor:
    """Return the tensor that lies in a block of bytes at a place; it is no view to autograd."""
    made = torch.empty(0, dtype=part.dtype, device=block.device)
    at = (block.storage_offset() + begin) // part.dtype.itemsize
    return made.set_(block.untyped_storage(), at, part.shape, part.strides)


def read_bytes(tensor: Tensor, begin: int, count: int) -> bytes:
    """Return bytes of a dense tensor in host memory, which has them: `count` of them from the place `begin` on."""
    # For a few bytes numpy takes several times as long.
    return ctypes.string_at(tensor.data_ptr() + begin, count)


def copy_all(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy values to places of the same shapes, in one call."""
    with torch.no_grad():
        torch._foreach_copy_(places, values)


def read_part(tensor: Any) -> TensorLayout:
    """Return how a tensor lies in memory, or would if it were dense."""
    dense = is_dense(tensor)
    strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
    return TensorLayout(tensor.dtype, tuple(tensor.shape), tuple(strides))
