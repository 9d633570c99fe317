"""Made-up weights: values for a model without weights, so that it can run and its structure can be tested.

For example, whether a loss is a mean or a sum over rows depends on the computation in `forward()`, not on the weights.
Values are generated for each operator that reads a weight and freed after it, so only one operator's weights take
memory.
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
"""The size of the pool of random numbers that fills weights. A prime, so that rows start at different pool positions.
"""
STRIDE = 7_919
"""The distance in the pool between the starts of consecutive weights. A prime too."""
SPREAD = 0.1
"""The standard deviation of vectors around 1. Vectors may be scales, shifts or variances, which must be positive."""
KEPT = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
"""Operators that keep the values of a weight, so that their result is a made-up weight as well."""


class MadeUp(Tensor):
    """A weight whose values are made up whenever an operator reads it.

    `number` distinguishes weights of the same shape.
    """

    number: int
    # Operators go to __torch_dispatch__ only, including those that torch calls internally.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on freshly generated values. Writes to a weight are lost."""
        kwargs = kwargs or {}
        if func in KEPT and isinstance(args[0], MadeUp):
            return make_up(args[0], args[0].number, kwargs.get("dtype"))
        args, kwargs = pytree.tree_map_only(MadeUp, make_values, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with the same values."""
        made = memo[id(self)] = make_up(self, self.number)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return dtype and shape."""
        return f"{type(self).__name__}({self.dtype}, {list(self.shape)})"


def make_up(weight: Tensor, number: int, dtype: torch.dtype | None = None) -> MadeUp:
    """Return a made-up weight in host memory with the layout and attributes of `weight`."""
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
    # torch's own marker for parameters of classes that are not derived from Parameter.
    made._is_param = isinstance(weight, nn.Parameter)
    found: MadeUp = made
    return found


def make_values(weight: MadeUp) -> Tensor:
    """Return the made-up values of a weight. They are the same in each dtype, up to rounding.

    Matrices are normally distributed, and scaled so that a product is about as large as its operand. Vectors and
    buffers are near 1. Integers are zeros, which are valid indices of any table, and booleans are true.
    """
    shape, strides = weight.shape, weight.stride()
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    memory = torch.empty(last + 1 if weight.numel() else 0, dtype=weight.dtype, device="cpu")
    if weight.dtype.is_floating_point or weight.dtype.is_complex:
        drawn = _take_pool(weight.number, min(memory.numel(), POOL))
        is_table = weight.ndim > 1 and weight._is_param
        pool = drawn / sqrt(_count_summed(shape)) if is_table else 1.0 + SPREAD * drawn.clamp(-5.0, 5.0)
        _fill(memory, pool.to(weight.dtype))
    else:
        memory.fill_(1 if weight.dtype is torch.bool else 0)
    return memory.as_strided(shape, strides)


def _fill(memory: Tensor, pool: Tensor) -> None:
    """Fill memory by repeating the pool. A pool that is shorter than POOL is as long as the memory."""
    whole = memory.numel() // POOL * POOL
    if whole:
        memory[:whole].view(-1, POOL).copy_(pool)
    memory[whole:].copy_(pool[: memory.numel() - whole])


def _count_summed(shape: Sequence[int]) -> int:
    """Return how many products a layer with a weight of this shape sums for each output element."""
    # Weights with three dimensions are stacks of matrices, such as experts; weights with more are convolutions.
    return max(shape[1:]) if len(shape) == 3 else prod(shape[1:])


def _take_pool(number: int, count: int) -> Tensor:
    """Return the first `count` numbers of the pool, rotated by a different amount for each weight."""
    begin = -number * STRIDE % POOL
    return _make_pool()[begin : begin + count]


@cache
def _make_pool() -> Tensor:
    """Return two copies of the pool of normally distributed random numbers, the same in every process."""
    return torch.randn(POOL, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).repeat(2)
