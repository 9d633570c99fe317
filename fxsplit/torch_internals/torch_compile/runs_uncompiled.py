"""Modules that torch.compile must not compile, since it cannot follow them or would recompile for every microbatch.

SeededCall and DeferredBatchNorm read state that changes with every microbatch. While they are active, a compiled stage
calls them between two compiled graphs. Dropout stays in the graph: it is a multiplication by a mask, and torch.compile
does not look into the operator that draws the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from fxsplit.torch_internals.torch_compile.stage_backends import mark_dynamic

F = TypeVar("F", bound=Callable[..., object])


def leave_uncompiled(function: F) -> F:
    """Return a function that runs uncompiled even if torch.compile compiles its caller.

    A pipeline starts threads and may capture a model. torch.compile can trace neither.
    """
    # torch.compiler.disable would import the compiler, which takes seconds even if nothing is ever compiled.
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)  # type: ignore[no-any-return]


class RunsUncompiled(nn.Module):
    """A module that a compiled stage calls between two graphs. If it is `idle`, it only passes its call on.

    row_dims: the dimensions of its output whose size follows the number of rows.
    """

    row_dims: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether the module, in its current state, only passes its call on to the module or function inside."""
        raise NotImplementedError


@leave_uncompiled
def call_apart(module: RunsUncompiled, *args: Any, **kwargs: Any) -> Any:
    """Call a module outside of compiled graphs."""
    result = module(*args, **kwargs)
    if isinstance(result, Tensor) and module.row_dims:
        mark_dynamic(result, module.row_dims)
    return result


def replace_calls(module: fx.GraphModule, by: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a graph's function in which some submodules are called through `by`: `by[path](submodule, ...)`.

    The function is a method of the same module, so it uses the module's current weights and submodules.
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
