"""Kinds of calls of a stage: the properties of a call that make torch.compile compile again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Dims = tuple[int, ...]
ANY = -1
"""Stands for any size from 2 up."""


class TensorKind(NamedTuple):
    """The properties of an input tensor that torch.compile specializes on. ANY stands for a dynamic size."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    wants_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, dims: Dims) -> TensorKind:
        """Return the kind of a tensor. The sizes of the dimensions `dims` follow the rows, so they become ANY."""
        sizes: tuple[int, ...] = tensor.shape
        if dims:
            sizes = tuple([ANY if d in dims and size > 1 else size for d, size in enumerate(sizes)])
        return cls(tensor.dtype, sizes, tensor.requires_grad)

    def __str__(self) -> str:
        """Return dtype and sizes, for example `float32[n, 64]`."""
        return f"{str(self.dtype)[6:]}[{', '.join('n' if size == ANY else str(size) for size in self.sizes)}]"


class CallKind(NamedTuple):
    """A kind of call of a stage. torch.compile compiles again for each new kind.

    given: the kind of each input. modes: grad mode, inference mode and autocast. training: the modules' training flags.
    """

    given: tuple[TensorKind | type, ...]
    modes: tuple[bool, bool, bool]
    training: tuple[bool, ...]

    def __str__(self) -> str:
        """Return the kind for a warning, for example `float32[n, 64] without gradients`."""
        words = ", ".join(one.__name__ if isinstance(one, type) else str(one) for one in self.given)
        gradients, inference, autocast = self.modes
        words += " in inference mode" if inference else "" if gradients else " without gradients"
        words += " in autocast" if autocast else ""
        return words + (" in evaluation" if self.training and not any(self.training) else "")
