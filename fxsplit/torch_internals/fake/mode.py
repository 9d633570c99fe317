"""A fake tensor mode that reproduces the side effects of real operators."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxsplit.torch_internals.fake.real_shapes import RealShapes
from fxsplit.torch_internals.fake.values import is_fake

READ = torch.ops.aten._local_scalar_dense.default
"""The operator that `item()` and `tolist()` call."""
NO_BACKWARD = -1
"""torch's id of the running backward if there is none."""


class WatchedFakeMode(FakeTensorMode):
    """A fake tensor mode with those side effects of real operators that observers look for.

    An operator that draws advances the random generator. An operator that updates running statistics increments their
    version counters.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._real_shapes = RealShapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        is_operator = isinstance(func, torch._ops.OpOverload)
        # Some backwards written in Python read values, such as the number of rows per expert. Return 0: the shape of a
        # gradient does not depend on them. In a forward, values may decide what is computed, so reading them is
        # refused.
        if func is READ and is_fake(args[0]) and torch._C._current_graph_task_id() != NO_BACKWARD:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (RuntimeError, TypeError, ValueError) as refused:
            if not is_operator:
                raise
            result = self._real_shapes.find(self, func, args, kwargs or {}, refused)
        if not is_operator or not _leaves_traces(func):
            return result
        given: dict[str, Any] = {a.name: a.default_value for a in func._schema.arguments}
        given |= {**dict(zip(given, args, strict=False)), **(kwargs or {})}
        # Attention is tagged as an operator that draws, but draws only with dropout.
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p", 1.0) > 0:
            with unset_fake_temporarily():
                torch.rand((), device="cpu")
        if "running_mean" in given and (given.get("training") or given.get("train")):
            torch.autograd.graph.increment_version(
                [given[n] for n in ("running_mean", "running_var") if isinstance(given.get(n), Tensor)]
            )
        return result


@cache  # called for every operator that runs, but there are few different operators
def _leaves_traces(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator may draw random numbers or update running statistics."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return draws or any(argument.name == "running_mean" for argument in func._schema.arguments)
