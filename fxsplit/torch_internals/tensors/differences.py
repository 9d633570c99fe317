"""Measure by how much two tensors that should be equal differ, relative to their size."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one output, gradient or buffer, and the difference that rounding explains.

    kind: a word such as "output" or "gradient".
    broken: whether rounding cannot be the reason, since the same operators, run as one piece, give another result.
    """

    kind: str
    name: str
    value: float
    rounding: float = 0.0
    broken: bool = False


def measure_difference(a: Tensor | None, b: Tensor | None, scale: float = 0.0) -> float:
    """Return max |a - b| / max(max |b|, scale), or infinity if only one exists, or if shapes or dtypes differ."""
    if a is None and b is None:
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    # torch.equal takes no sparse tensors, and no tensors on two devices. Most pairs are equal, and need no copies.
    if a.numel() == 0 or (not a.is_sparse and a.device == b.device and torch.equal(a, b)):
        return 0.0
    a, b = widen(a), widen(b)
    # inf - inf is NaN, so define the difference of equal values as zero.
    alike = (a == b) | (a.isnan() & b.isnan())
    difference = float(torch.where(alike, 0.0, (a - b).abs()).max())
    size = max(float(b.abs().nan_to_num(posinf=0.0).max()), scale, sys.float_info.min)
    return difference / size if math.isfinite(difference) else math.inf


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor's values in host memory, dense and in double precision."""
    tensor = tensor.detach().cpu()
    return (tensor.to_dense() if tensor.is_sparse else tensor).to(widen_dtype(tensor, torch.float64))


def widen_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return a floating dtype, or the complex dtype of the same precision for a complex tensor."""
    return dtype.to_complex() if tensor.is_complex() else dtype
