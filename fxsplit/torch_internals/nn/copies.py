"""Copy a module that keeps results of calls in attributes.

torch's deepcopy refuses a tensor that autograd has computed, since its copy would have no graph. A module may keep such
tensors: its last activations, an attention map for inspection, the weight that `weight_norm` computes. They are results
of a call, so their copies are plain values.
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
"""The function that copies a tensor. Function modes see its calls."""


def copy_module(module: T, memo: dict[int, Any] | None = None) -> T:
    """Return a deep copy of a module, in which tensors that autograd has computed are detached.

    memo: as for `copy.deepcopy`, the copies made so far, by id.
    """
    with enter_function_mode(_Detaching()):
        return copy.deepcopy(module, memo)


class _Detaching(TorchFunctionMode):
    """Copies the value, the gradient and the attributes of a tensor one by one, since each of them may have a graph."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function, or copy a tensor. This mode is not active meanwhile."""
        if func is not COPY:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) in memo:
            return memo[id(tensor)]
        if tensor.is_leaf and tensor.grad is None and not tensor.__dict__:
            return func(*args)
        # `alone` has no graph, gradient or attributes. It shares the memory, so copies of sharing tensors share theirs.
        alone = tensor.detach()
        made = memo[id(tensor)] = func(alone, memo)
        # The memo is keyed by id. Keep `alone`, as deepcopy keeps its objects, so that no other object gets the same
        # id.
        memo.setdefault(id(memo), []).append(alone)
        with enter_function_mode(self):
            made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
            if tensor.is_leaf:
                made.requires_grad_(tensor.requires_grad)
                made.grad = copy.deepcopy(tensor.grad, memo)
        return made
