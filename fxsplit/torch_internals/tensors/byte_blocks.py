"""Byte blocks: pack several small tensors into one message, in memory order, with their strides.

A tensor from a block shares the block's memory, but has its own version counter, so a write to it does not count as a
write to the other tensors of the block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNED = 16
"""The alignment in bytes of each tensor in a block."""


class TensorLayout(NamedTuple):
    """The memory layout of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self.numel * self.dtype.itemsize


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory without holes, in any order of dimensions."""
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
    """Return whether a layout has torch's default strides for its shape."""
    expected, strides = 1, []
    for length in reversed(part.shape):
        strides.append(expected)
        expected *= length
    return part.strides == tuple(reversed(strides))


def place(parts: Sequence[TensorLayout]) -> tuple[list[int], int]:
    """Return the offset of each part in a block, and the length of the block, both in bytes."""
    places, end = [], 0
    for part in parts:
        places.append(end)
        end += part.nbytes + -part.nbytes % ALIGNED
    return places, end


def flatten(tensor: Tensor) -> Tensor:
    """Return a 1-D view of the elements of a dense tensor, in memory order."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def make_view(block: Tensor, part: TensorLayout, begin: int) -> Tensor:
    """Return a tensor at an offset in a block of bytes.

    It shares the block's memory, but to autograd it is not a view.
    """
    made = torch.empty(0, dtype=part.dtype, device=block.device)
    at = (block.storage_offset() + begin) // part.dtype.itemsize
    return made.set_(block.untyped_storage(), at, part.shape, part.strides)


def read_bytes(tensor: Tensor, begin: int, count: int) -> bytes:
    """Return `count` bytes of a dense tensor in host memory, from the offset `begin` on."""
    # For a few bytes, numpy takes several times as long.
    return ctypes.string_at(tensor.data_ptr() + begin, count)


def copy_all(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value to the tensor at the same index of `places`, which has the same shape, in one call."""
    with torch.no_grad():
        torch._foreach_copy_(places, values)


def read_part(tensor: Any) -> TensorLayout:
    """Return the layout of a tensor. If the tensor is not dense, return torch's default layout for its shape."""
    dense = is_dense(tensor)
    strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
    return TensorLayout(tensor.dtype, tuple(tensor.shape), tuple(strides))
