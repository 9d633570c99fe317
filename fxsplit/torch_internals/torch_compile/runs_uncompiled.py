"""Modules whose Python torch.compile cannot follow, or would compile anew for every microbatch, and what is done then.

A draw from a generator state of its own, and a batch norm that notes its statistics, read what differs from microbatch
to microbatch. Where they are at work, a compiled stage calls them between two graphs. Dropout stays in the graph: there
it is a product with a mask, which one operator draws that torch.compile does not look into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, fx, nn

from fxsplit.torch_internals.torch_compile.stage_backends import mark_dynamic
from fxsplit.torch_internals.torch_compile.uncompiled import leave_uncompiled


class RunsUncompiled(nn.Module):
    """A module that is called between two graphs unless it is `idle`, and just hands on its call.

    row_dims: the dimensions of its output whose sizes follow the rows.
    """

    row_dims: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether the module just hands on its call, as it is now."""
        raise NotImplementedError


@leave_uncompiled
def call_apart(module: RunsUncompiled, *args: Any, **kwargs: Any) -> Any:
    """Return what a module returns, which runs as it is."""
    result = module(*args, **kwargs)
    if isinstance(result, Tensor) and module.row_dims:
        mark_dynamic(result, module.row_dims)
    return result


def replace_calls(module: fx.GraphModule, by: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a graph's function, in which `by[path](submodule, ...)` takes the place of calls of that submodule.

    It is a method of the same module, and so sees weights and modules as they are when it is called.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.find_nodes(op="call_module"):
        function = by.get(str(node.target))
        if function is not None:
            with graph.inserting_before(node):
                held = graph.get_attr(str(node.target))
            node.op, node.target, node.args = "call_function", function, (held, *node.args)
    made = fx.GraphModule(module, graph, class_name=type(module).__name__)
    return MethodType(type(made).forward, module)
