"""Run all stages on one microbatch and record the value of every node, as a real or a fake tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fxsplit.torch_internals.fake.runnable import make_runnable
from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.fake.without_weights import lacks_values
from fxsplit.torch_internals.fx.interpret import Interpreter, preserve

Values = list[Mapping[fx.Node, Any]]
"""For each stage, the value of each node."""


def record_values(stages: Sequence[fx.GraphModule], tensors: Sequence[Tensor]) -> Values:
    """Return the value of each node of the stages for one microbatch, computed with fake tensors if possible.

    tensors: the inputs of the first stage. If shapes are not enough, for example because a node reads values, the
        stages run on these tensors and the model's own weights.
    """
    whole = nn.ModuleList(stages)  # an nn.Module, in which torch finds weights
    try:
        return _record(stages, whole, tensors, from_shapes=True)
    except Exception:
        # The computation depends on values. Re-raise if the weights have no values yet.
        if lacks_values(whole) or not all(map(has_values, tensors)):
            raise
        return _record(stages, whole, tensors, from_shapes=False)


def list_outputs(stage: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes whose values a stage outputs."""
    return list(cast("tuple[fx.Node, ...]", stage.graph.output_node().args[0]))


def _record(
    stages: Sequence[fx.GraphModule], whole: nn.ModuleList, tensors: Sequence[Tensor], *, from_shapes: bool
) -> Values:
    found: Values = []
    with make_runnable(whole, tensors, from_shapes) as (_, inputs), preserve(whole), torch.enable_grad():
        given: Sequence[Any] = inputs
        for stage in stages:
            recorder = _Recorder(stage)
            # As in the runtime: the autograd graph of each stage ends at its boundary.
            leaves = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in given]
            given = recorder.run(*leaves)
            found.append(recorder.values)
    return found


class _Recorder(Interpreter):
    """Interprets a graph, and records the value of each node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record its value."""
        self.values[n] = made = super().run_node(n)
        return made
