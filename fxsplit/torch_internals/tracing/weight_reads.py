"""Detect operators that run directly on weights while a model is traced, since the graph would store their results.

Tracing gives forward() a proxy for `self.fc.weight`, and records the operations on it. Access that bypasses the
attribute, such as `self.parameters()` or `self.state_dict()`, returns the weight itself. An operator on the weight runs
immediately, and the graph would keep the result as a constant, whatever values the weight has later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.errors import TraceError
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.interpret import get_storage_id
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode


class _Refusal(TorchDispatchMode):
    """Refuses operators that read the memory of weights."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = type(model).__name__
        named = (*model.named_parameters(), *model.named_buffers())
        # By storage, since an operator may get a view, or the result of detach().
        self._paths = {get_storage_id(weight): path for path, weight in named}
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, or raise TraceError if it reads a weight."""
        kwargs = kwargs or {}
        memory = [get_storage_id(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.read.update(memory)
        path = next((self._paths[key] for key in memory if key in self._paths), None)
        if path is not None:
            raise TraceError(
                f"forward() of {self._name} computes with {path!r} in a way that tracing does not see, such as "
                "through self.parameters() or self.state_dict(), so the result would not change in training: "
                "read it as an attribute, such as self.fc.weight"
            )
        return func(*args, **kwargs)


@contextmanager
def refuse_weight_reads(model: nn.Module) -> Iterator[set[int]]:
    """Inside the block, raise TraceError if this thread runs an operator directly on a parameter or buffer.

    Yields the storage ids of the other tensors that operators have read.
    """
    refusal = _Refusal(model)
    with enter_dispatch_mode(refusal):
        yield refusal.read
