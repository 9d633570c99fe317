"""The symbolic tracer: which modules stay whole, and what a failure says."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from fxsplit.errors import TraceError
from fxsplit.inputs import Inputs, TensorSpec
from fxsplit.structures import LIBRARIES


class Tracer(fx.Tracer):
    """fx's tracer for a model called as `inputs` describes.

    Tensor arguments become placeholders and everything else becomes part of the graph. Normalisation and dropout
    modules stay whole wherever they come from: traced into, they would keep the mode they were traced in.
    """

    proxy_buffer_attributes = True  # otherwise a write to a buffer would happen once, while tracing

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.failed_in: str | None = None
        self._inputs = inputs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keep torch's own modules whole, and whatever behaves differently in training and evaluation."""
        return isinstance(m, (_NormBase, _DropoutNd)) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a call, remembering the innermost module in which tracing fails."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or self.path_of_module(m)
            raise

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return a function of the root alone that calls it with one placeholder for each tensor argument."""
        leaves = [
            self.create_proxy("placeholder", leaf.name, (), {}) if isinstance(leaf, TensorSpec) else leaf
            for leaf in self._inputs.leaves
        ]
        arguments = pytree.tree_unflatten(leaves, self._inputs.structure)
        bound = inspect.BoundArguments(self._inputs.signature, arguments)
        return lambda root: root_fn(root, *bound.args, **bound.kwargs), [self.root]


def symbolic_trace(model: nn.Module, inputs: Inputs) -> fx.GraphModule:
    """Return the graph of `model` in its present mode; raises TraceError naming file, line and submodule."""
    tracer = Tracer(inputs)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise _explain(model, tracer, error) from error
    return fx.GraphModule(model, graph, class_name=type(model).__name__)


def _explain(model: nn.Module, tracer: Tracer, error: Exception) -> TraceError:
    """Return a TraceError that points at the user's line in which tracing stopped."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))]
    place = f"{own[-1].filename}:{own[-1].lineno}, {(own[-1].line or '').strip()!r}" if own else "an unknown line"
    module = f"submodule {tracer.failed_in!r}" if tracer.failed_in else "its own forward()"
    return TraceError(
        f"symbolic tracing cannot follow {type(model).__name__} in {module} at {place}: {error}. Control flow that "
        "depends on tensor values cannot become a graph: compute both sides and select with torch.where, or mark the "
        "function with torch.fx.wrap so that it stays one node"
    )
