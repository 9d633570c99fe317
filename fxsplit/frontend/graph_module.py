"""The user's own graph, taken as it is."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxsplit.errors import TraceError
from fxsplit.ir.facts.call import Inputs, TensorSpec


def copy_given_graph(model: fx.GraphModule, inputs: Inputs) -> fx.GraphModule:
    """Return the same nodes, with a placeholder for each tensor argument and the others' values in their places."""
    graph = fx.Graph()
    names = iter(inputs.specs)
    leaves = [graph.placeholder(next(names).name) if isinstance(v, TensorSpec) else v for v in inputs.leaves]
    arguments = pytree.tree_unflatten(leaves, inputs.structure)
    values: dict[fx.Node, Any] = {}
    held: dict[str, Any] = {}
    for node in model.graph.nodes:
        if node.op == "placeholder":
            name = str(node.target).lstrip("*")
            if name not in arguments:
                raise TraceError(f"the graph has an input {name!r} that its forward() does not take: recompile it")
            values[node] = arguments[name]
            continue
        if node.op in ("call_module", "get_attr"):
            held[str(node.target)] = operator.attrgetter(str(node.target))(model)
        values[node] = graph.node_copy(node, lambda n: values[n])
    return fx.GraphModule(held, graph, class_name=type(model).__name__)
