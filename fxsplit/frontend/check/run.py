"""Run a graph after its model has run: an error here is a fault of the capture.

The run also notes shapes in the nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit.errors import FxsplitError, TraceError
from fxsplit.frontend.graph import find_line, find_submodule
from fxsplit.frontend.subject import Runnable
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.interpret import Interpreter, describe_tensor, preserve


class Runner(Interpreter):
    """Runs the graph of a model that has run without errors: if the graph fails, the capture has lost something.

    noted: a graph whose nodes get the dtype and shape of their values, for dumps. `gm` may be a copy of it.
    """

    def __init__(self, gm: fx.GraphModule, noted: fx.GraphModule | None = None) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # it would follow the text of an error, which already says what to do
        self._noted = {} if noted is None else {n.name: n for n in noted.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node. Raises TraceError, with the node's name, if the node fails."""
        try:
            value = super().run_node(n)
        except FxsplitError:  # says more than a TraceError would
            raise
        except Exception as error:
            path = find_submodule(n) or "its.path"
            raise TraceError(
                f"node {n.name!r}{find_line(n)} of the graph does not run, although the model does "
                f"({summarize(error)}): keep the module around it whole, fxsplit.leaf({path!r})",
                submodule=find_submodule(n),
            ) from error
        if n.op != "placeholder":
            _refuse_sparse(n, value)
        # By name, since the nodes of a copy are other objects.
        if n.name in self._noted:
            self._noted[n.name].meta["fxsplit_shape"] = describe(value)
        return value


def make_noting(gm: fx.GraphModule, noted: fx.GraphModule) -> Callable[..., Any]:
    """Return the code of a graph as a function that also notes the shapes of all values in the nodes of `noted`."""
    named = {n.name: n for n in noted.graph.nodes}

    def note(name: str, value: Any) -> None:
        if named[name].op != "placeholder":
            _refuse_sparse(named[name], value)
        named[name].meta["fxsplit_shape"] = describe(value)

    graph = copy.deepcopy(gm.graph)
    output = graph.output_node()
    for node in list(graph.nodes):
        # A note of an argument comes after all arguments.
        after = node.next if node.next.op != "placeholder" else next(n for n in graph.nodes if n.op != "placeholder")
        if node is not output:
            with graph.inserting_before(after):
                graph.call_function(note, (node.name, node))
    noting = fx.GraphModule(gm, graph)

    def run(*tensors: Tensor) -> Any:
        # forward() instead of a call, since a GraphModule that fails in a call prints its code.
        outputs = noting.forward(*tensors)
        note(output.name, outputs)
        return outputs

    return run


def run_code(here: Runnable) -> None:
    """Raise TraceError unless the graph also runs as code, since stages run code instead of an interpreter.

    Code contains the repr of each argument, which need not be Python.
    """
    with torch.no_grad(), preserve(here.modules):
        try:
            # forward() instead of a call, since a GraphModule that fails in a call prints its code.
            here.graph.forward(*here.clone_tensors())
        except Exception as error:
            paths = (str(node.target) for node in here.graph.graph.nodes if node.op in ("call_module", "get_attr"))
            odd = next((path for path in paths if any(map(_is_odd, path.split(".")))), None)
            if odd is not None:
                raise TraceError(
                    f"submodule {odd!r} of {here.name} has a name that torch.fx cannot write into code: call it by a "
                    "name that is no keyword of Python and has no quotes, or keep the module around it whole "
                    f"(fxsplit.leaf({odd.rpartition('.')[0]!r}))"
                ) from error
            raise TraceError(
                f"the code of the graph of {here.name} does not run, although its nodes do ({summarize(error)}): an "
                "argument of a call in forward() has a repr that is not Python code; pass plain numbers, texts and "
                "tensors, or wrap the function that is called with torch.fx.wrap"
            ) from error


def _is_odd(name: str) -> bool:
    """Return whether torch.fx cannot write the name of a submodule into code."""
    return iskeyword(name) or not {'"', "\\", "\n"}.isdisjoint(name)


def _refuse_sparse(node: fx.Node, value: Any) -> None:
    """Raise TraceError for a node that makes or fetches a sparse tensor: stages cannot hand on sparse tensors."""
    sparse = (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.layout is not torch.strided)
    if (found := next(sparse, None)) is not None:
        raise TraceError(
            f"node {node.name!r} of the graph is a {found.layout} tensor, and stages only hand on strided ones: make "
            "or keep it, and use it, in one submodule, which then stays whole",
            submodule=find_submodule(node),
        )


def describe(value: Any) -> str:
    """Return a tensor's dtype and shape, or the type name of any other value."""
    return describe_tensor(value) if isinstance(value, Tensor) else type(value).__name__


def summarize(error: Exception) -> str:
    """Return the first line of an error; torch's errors continue with traces of C++."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
