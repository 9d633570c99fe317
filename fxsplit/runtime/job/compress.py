"""Compress values that cross between devices, and restore them there. `ir/facts/costs/compress.py` lists the methods.

Autograd sees neither the compression nor the restoring: the receiving stage takes the restored value for the value
itself. The gradient comes back compressed as well, and is taken for the gradient of the value. Such a rule for the
gradient is called a *straight-through* estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.ir.facts.costs.compress import find_row_length, is_compressed

MOST = 127.0
"""The largest magnitude used in int8: the range is symmetric."""


@torch.no_grad()
def compress(values: Sequence[Any], about: Sequence[Any], how: str) -> tuple[list[Any], list[Any]]:
    """Return the values in fewer bytes, followed by one *item* for each value, from which `restore` restores it.

    Also returns `about`, which describes each value (see `Message`), twice in a row: for the values and for the items.
    The item of a value is:

    - None, if the value is not compressed
    - for int8, the scale of each row
    - for bf16, an empty tensor of the original dtype

    For a missing gradient, both value and item are None.
    how: the method, "int8" or "bf16".
    """
    short: list[Any] = []
    rest: list[Any] = []
    # All items follow all values, so that each value keeps its index, which its gradient will have too.
    for value in values:
        if not _is_compressed(value, how):
            pair: tuple[Any, Any] = value, None
        elif how == "bf16":
            pair = value.to(torch.bfloat16), value.new_empty(0)
        else:
            pair = quantize(value)
        short.append(pair[0])
        rest.append(pair[1])
    return [*short, *rest], [*about, *about]


@torch.no_grad()
def restore(values: Sequence[Any], about: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """Return the values that `compress` was given, with the lost precision, and their descriptions."""
    half = len(values) // 2
    found = []
    for value, rest in zip(values[:half], values[half:], strict=True):
        # The item of a missing gradient may still arrive: an empty tensor has no bytes to mark it as missing.
        if rest is None or value is None:
            found.append(value)
        elif value.dtype is torch.int8:
            found.append(dequantize(value, rest))
        else:
            found.append(value.to(rest.dtype))
    return found, about[: len(about) // 2]


def quantize(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return `value` as int8 numbers of magnitude at most MOST, and a scale for each row, in the dtype of `value`.

    A row with an infinite or NaN element is restored with only infinite or NaN elements, so that checks such as
    GradScaler's find them.
    """
    rows = value.reshape(-1, find_row_length(value.shape))
    # Divide in float32 at least: the range of float16 is too small.
    wide = rows.to(torch.promote_types(value.dtype, torch.float32))
    scales = (wide.abs().amax(1, keepdim=True) / MOST).to(value.dtype)
    divisors = scales.to(wide.dtype)
    # A row of zeros has the scale zero: do not divide by it.
    whole = (wide / divisors.where(divisors > 0, 1.0)).round_().clamp_(-MOST, MOST)
    return whole.nan_to_num_(0.0).to(torch.int8).view(value.shape), scales.view(-1)


def dequantize(whole: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that `quantize` was given, up to rounding."""
    # The number of scales gives the length of the rows.
    rows = whole.reshape(scales.numel(), -1).to(scales.dtype)
    # Infinity times zero is NaN, so the whole row becomes infinite or NaN.
    return (rows * scales.unsqueeze(1)).view(whole.shape)


def _is_compressed(value: Any, how: str) -> bool:
    dense = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
    return dense and is_compressed(how, str(value.dtype).removeprefix("torch."), value.shape)
