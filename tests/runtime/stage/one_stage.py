"""A stage made by hand, for tests of its users."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fxsplit.ir.facts.stages import Stage

CPU = torch.device("cpu")


def trace_stage(module: nn.Module, index: int = 0, device: torch.device = CPU) -> Stage:
    """Return a stage with the nodes of a module that returns a tuple."""
    return _stage(fx.symbolic_trace(module), index, device)


def whole_stage(module: nn.Module, index: int = 0) -> Stage:
    """Return a stage with one node that calls a module of one input, which returns a tuple."""
    graph = fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    return _stage(fx.GraphModule({"inner": module}, graph), index, CPU)


def _stage(gm: fx.GraphModule, index: int, device: torch.device) -> Stage:
    inputs = tuple(n.name for n in gm.graph.nodes if n.op == "placeholder")
    returned: Any = gm.graph.output_node().args[0]
    outputs = tuple(str(value) for value in returned) if isinstance(returned, tuple) else (str(returned),)
    return Stage(index, f"cpu:{index}", device, gm, inputs, outputs)
