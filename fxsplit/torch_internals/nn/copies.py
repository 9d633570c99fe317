"""Copy a module, with what calls of it have left among its attributes.

torch's deepcopy refuses a tensor that autograd has computed, since a copy of it would have no graph. A module may keep
such tensors: its last activations, an attention map to look at, the weight that `weight_norm` computes. They are
results of a call, and so their copies are plain values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxsplit.torch_internals.thread_modes import enter_function_mode

T = TypeVar("T")

COPY: Any = Tensor.__deepcopy__
"""What copies a tensor, and sees the modes in force."""


def copy_module(module: T, memo: dict[int, Any] | None = None) -> T:
    """Return a deep copy, in which tensors that autograd has computed are detached; the module's own stay as they are.

    memo: as for `copy.deepcopy`, what has been copied already, by id.
    """
    with enter_function_mode(_Detaching()):
        return copy.deepcopy(module, memo)


class _Detaching(TorchFunctionMode):
    """Copies a tensor that has a graph, a gradient or attributes part by part, each of which may have a graph."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function of torch's; no mode is in force meanwhile."""
        if func is not COPY:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        if tensor.is_leaf and tensor.grad is None and not tensor.__dict__:
            return func(*args)
        # Without graph, gradient and attributes. It shares its memory with `tensor`, and so do the copies of both.
        alone = tensor.detach()
        made = memo[id(tensor)] = func(alone, memo)
        # The memo goes by id. As long as `alone` is kept, no other object gets its id. deepcopy keeps objects so too.
        memo.setdefault(id(memo), []).append(alone)
        with enter_function_mode(self):
            made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
            if tensor.is_leaf:
                made.requires_grad_(tensor.requires_grad)
                made.grad = copy.deepcopy(tensor.grad, memo)
        return made
