"""Kinds of calls of a stage: what torch.compile compiles a stage by, as far as it is known outside of torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Dims = tuple[int, ...]
ANY = -1
"""Stands for a size that may be any from 2 on."""


class TensorKind(NamedTuple):
    """A tensor that a stage is given, as far as it is compiled by that; sizes that may be any from 2 on are ANY."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, dims: Dims) -> TensorKind:
        """Return what there is to know of a tensor, whose sizes in some dimensions follow the rows."""
        sizes: tuple[int, ...] = tensor.shape
        if dims:
            sizes = tuple([ANY if d in dims and size > 1 else size for d, size in enumerate(sizes)])
        return cls(tensor.dtype, sizes, tensor.requires_grad)

    def __str__(self) -> str:
        """Dtype and sizes, for example `float32[n, 64]`."""
        return f"{str(self.dtype)[6:]}[{', '.join('n' if size == ANY else str(size) for size in self.sizes)}]"


class CallKind(NamedTuple):
    """A kind of call: its inputs, whether gradients, inference mode and autocast are on, and the modes of modules."""

    given: tuple[TensorKind | type, ...]
    modes: tuple[bool, bool, bool]
    training: tuple[bool, ...]

    def __str__(self) -> str:
        """What the kind is, as far as it may be of interest, for example `float32[n, 64] without gradients`."""
        words = ", ".join(one.__name__ if isinstance(one, type) else str(one) for one in self.given)
        gradients, inference, autocast = self.modes
        words += " in inference mode" if inference else "" if gradients else " without gradients"
        words += " in autocast" if autocast else ""
        return words + (" in evaluation" if self.training and not any(self.training) else "")
