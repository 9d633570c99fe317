"""Tensor layouts: the strided tensors that hold the memory and the values of a sparse tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def list_parts(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that a sparse tensor consists of, its values first.

    Return [tensor] for other tensors.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in _COMPRESSED:
        return [tensor.values(), *(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout])]
    return [tensor]


def count_bytes(tensor: Tensor) -> int:
    """Return how many bytes the values of a tensor take."""
    return sum(part.nbytes for part in list_parts(tensor))
