"""What every node of every stage makes of one microbatch: the values themselves, or stand-ins with their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fxsplit.torch_internals.fake.fake_weights import has_values, lacks_values, make_runnable
from fxsplit.torch_internals.fx.interpret import Interpreter, preserve

Values = list[Mapping[fx.Node, Any]]
"""For each stage, what its nodes made."""


def record_values(stages: Sequence[fx.GraphModule], tensors: Sequence[Tensor]) -> Values:
    """Return what the nodes of stages make of a microbatch, from stand-ins for all weights and values.

    tensors: the inputs of the first stage; the model's own, where stand-ins do not do, as of what reads values.
    """
    whole = nn.ModuleList(stages)  # torch looks for weights in modules
    try:
        return _record(stages, whole, tensors, from_shapes=True)
    except Exception:
        # Values decide what is computed. Nobody has them where the model has no weights yet.
        if lacks_values(whole) or not all(map(has_values, tensors)):
            raise
        return _record(stages, whole, tensors, from_shapes=False)


def list_outputs(stage: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes whose values a stage gives."""
    return list(cast("tuple[fx.Node, ...]", stage.graph.output_node().args[0]))


def _record(
    stages: Sequence[fx.GraphModule], whole: nn.ModuleList, tensors: Sequence[Tensor], *, from_shapes: bool
) -> Values:
    found: Values = []
    with make_runnable(whole, tensors, from_shapes) as (_, inputs), preserve(whole), torch.enable_grad():
        given: Sequence[Any] = inputs
        for stage in stages:
            recorder = _Recorder(stage)
            # As the runtime: the graph of each stage ends at its boundary.
            leaves = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in given]
            given = recorder.run(*leaves)
            found.append(recorder.values)
    return found


class _Recorder(Interpreter):
    """Interprets a graph, and keeps what each node made."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Return what a node makes."""
        self.values[n] = made = super().run_node(n)
        return made
