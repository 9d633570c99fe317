"""Make a tensor look like a weight: with the weight's class, attributes and requires_grad."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

P = TypeVar("P", bound=Tensor)


def fill_like(weight: P, value: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> P:
    """Return a tensor with the values of `value`, and the class, attributes, strides and requires_grad of `weight`.

    Device and dtype default to those of `value`.
    """
    device, dtype = device or value.device, dtype or value.dtype
    return dress_like(
        weight, torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device=device).copy_(value)
    )


def dress_like(weight: P, value: Tensor) -> P:
    """Return a tensor that shares memory with `value` and has the class, attributes and requires_grad of `weight`."""
    made = value
    if isinstance(weight, nn.Parameter):
        # A subclass of Parameter may have its own constructor, which _make_subclass does not call.
        made = torch.Tensor._make_subclass(type(weight), made, weight.requires_grad)
    made.requires_grad_(weight.requires_grad)
    made.__dict__.update(weight.__dict__)
    return cast(P, made)
