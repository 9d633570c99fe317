"""Made-up weights: values for a model that has none, so that it can be run to find out how it is built.

Whether a loss is a mean or a sum over rows follows from what `forward()` computes, and not from what the weights are.
The values of a weight are made for each operator that reads them, and are given back after it: only the weight that is
read takes memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten

POOL = 65_537
"""So many random numbers are repeated in a weight. It is a prime: rows of most lengths begin at other numbers of it."""
STRIDE = 7_919
"""So many numbers later in the pool the next weight begins; it is a prime too."""
SPREAD = 0.1
"""How far a number of a vector is from 1. Vectors are scales, shifts, and variances, which must be positive."""
KEPT = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
"""Operators whose result has the same values, and is made up as well."""


class MadeUp(Tensor):
    """A weight with made-up values; `number` tells weights of one shape apart."""

    number: int
    # Operators come to __torch_dispatch__, also those that torch calls itself.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on values that are made now. What it writes to a weight is lost."""
        kwargs = kwargs or {}
        if func in KEPT and isinstance(args[0], MadeUp):
            return make_up(args[0], args[0].number, kwargs.get("dtype"))
        args, kwargs = pytree.tree_map_only(MadeUp, make_values, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another one with the same values."""
        made = memo[id(self)] = make_up(self, self.number)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the tensor's shape."""
        return f"{type(self).__name__}({self.dtype}, {list(self.shape)})"


def make_up(weight: Tensor, number: int, dtype: torch.dtype | None = None) -> MadeUp:
    """Return a weight in host memory like another one, with the attributes of that one and made-up values."""
    made: Any = torch.Tensor._make_wrapper_subclass(
        MadeUp,
        weight.shape,
        weight.stride(),
        dtype=dtype or weight.dtype,
        device=torch.device("cpu"),
        requires_grad=weight.requires_grad,
    )
    made.__dict__.update(weight.__dict__)
    made.number = number
    # So torch marks a parameter of a class that is not derived from Parameter.
    made._is_param = isinstance(weight, nn.Parameter)
    found: MadeUp = made
    return found


def make_values(weight: MadeUp) -> Tensor:
    """Return the values of a weight, the same ones in each dtype but for rounding.

    Those of matrices are normal numbers, such that a product with one is about as large as its operand. Those of
    vectors and buffers are near 1. Integers are zeros, which are valid indices of any table, and booleans are true.
    """
    shape, strides = weight.shape, weight.stride()
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    memory = torch.empty(last + 1 if weight.numel() else 0, dtype=weight.dtype, device="cpu")
    if weight.dtype.is_floating_point or weight.dtype.is_complex:
        drawn = _take_pool(weight.number)
        is_table = weight.ndim > 1 and weight._is_param
        pool = drawn / sqrt(_count_summed(shape)) if is_table else 1.0 + SPREAD * drawn.clamp(-5.0, 5.0)
        _fill(memory, pool.to(weight.dtype))
    else:
        memory.fill_(1 if weight.dtype is torch.bool else 0)
    return memory.as_strided(shape, strides)


def _fill(memory: Tensor, pool: Tensor) -> None:
    """Fill memory with the numbers of a pool, again and again."""
    whole = memory.numel() // POOL * POOL
    memory[:whole].view(-1, POOL).copy_(pool)
    memory[whole:].copy_(pool[: memory.numel() - whole])


def _count_summed(shape: Sequence[int]) -> int:
    """Return how many products a layer adds up for each number that it makes, with a weight of this shape."""
    # Three dimensions are those of several matrices, such as the experts of a mixture, and more those of convolutions.
    return max(shape[1:]) if len(shape) == 3 else prod(shape[1:])


def _take_pool(number: int) -> Tensor:
    """Return the random numbers that a weight is made of: those that there are, from another one on for each weight."""
    return _make_pool().roll(number * STRIDE)


@cache
def _make_pool() -> Tensor:
    """Return random numbers."""
    return torch.randn(POOL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
