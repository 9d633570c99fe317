"""Compress what crosses from device to device, and restore it there; see ir/facts/costs/compress.py for the ways.

Nothing here is differentiated. The receiving stage takes what is restored for the value itself, and its gradient comes
back compressed as well and is taken for the gradient of the value: the cut is *straight-through*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.ir.facts.costs.compress import find_row_length, is_compressed

MOST = 127.0
"""The largest whole number that int8 is used for: the range is symmetric."""


@torch.no_grad()
def compress(values: Sequence[Any], about: Sequence[Any], how: str) -> tuple[list[Any], list[Any]]:
    """Return values in fewer bytes, and behind them as many others that restore each of them; `about` is doubled.

    What restores a value is None for one that stays as it is, the scales of its rows for int8, and for bf16 an empty
    tensor of the dtype that it had. A gradient that is None has the places of one that is there.
    """
    short: list[Any] = []
    rest: list[Any] = []
    # Behind all values and not beside each, so that a value keeps its place, where its gradient will be, too.
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
    """Return the values that `compress` was given, as far as they can be restored."""
    half = len(values) // 2
    found = []
    for value, rest in zip(values[:half], values[half:], strict=True):
        # Of a gradient that there is not, what restores it may be there: without elements, it cannot be marked.
        if rest is None or value is None:
            found.append(value)
        elif value.dtype is torch.int8:
            found.append(dequantize(value, rest))
        else:
            found.append(value.to(rest.dtype))
    return found, about[: len(about) // 2]


def quantize(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers of at most MOST, int8 in the shape of `value`, and the scale of each row, in its dtype.

    A row with an element that is infinite or no number is restored as such elements alone: what looks for them, as
    GradScaler does, finds them.
    """
    rows = value.reshape(-1, find_row_length(value.shape))
    # In float32 at least: float16 has too small a range for what is divided here.
    wide = rows.to(torch.promote_types(value.dtype, torch.float32))
    scales = (wide.abs().amax(1, keepdim=True) / MOST).to(value.dtype)
    divisors = scales.to(wide.dtype)
    # A row of zeros has the scale zero.
    whole = (wide / divisors.where(divisors > 0, 1.0)).round_().clamp_(-MOST, MOST)
    return whole.nan_to_num_(0.0).to(torch.int8).view(value.shape), scales.view(-1)


def dequantize(whole: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that `quantize` was given, as far as they can be restored."""
    # The number of scales says how long the rows are.
    rows = whole.reshape(scales.numel(), -1).to(scales.dtype)
    # Infinite times zero is no number, and so is all of the row.
    return (rows * scales.unsqueeze(1)).view(whole.shape)


def _is_compressed(value: Any, how: str) -> bool:
    dense = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
    return dense and is_compressed(how, str(value.dtype).removeprefix("torch."), value.shape)
