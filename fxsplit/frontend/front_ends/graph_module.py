"""The third front end: the user's own fx.GraphModule, taken as it is."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.fetches import fetch_apart
from fxsplit.frontend.graph import Graph
from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.numbers import hold_numbers, name_numbers
from fxsplit.ir.facts.capture.scope import Scope


@dataclass(frozen=True)
class GivenGraph:
    """The front end for a model that is already a graph, from any tracer."""

    name: str = "graph_module"

    @staticmethod
    def takes(model: nn.Module) -> bool:
        """Return whether the model is a graph that is called like a module.

        The module of an exported program is not such a graph, since its code generator flattens the arguments. It is
        traced like any other model.
        """
        return isinstance(model, fx.GraphModule) and type(model.graph._codegen) is fx.graph.CodeGen

    def attempt(self, subject: Subject) -> Graph:
        """Return a graph with the same nodes.

        Each tensor argument has a placeholder, and all other arguments are constants.
        Each reader of a parameter gets its own fetch (see `fetch_apart`). A graph with placeholders `x` and `extra`,
        called with `extra={"gain": 2.0, "bias": tensor}`, gets the placeholders `x` and `extra_bias`. Raises TraceError
        if graph and forward() have different arguments.
        """
        model, inputs = subject.model, subject.inputs
        assert isinstance(model, fx.GraphModule)
        # Each tensor of the call becomes a placeholder, and each number stays a number.
        graph = fx.Graph()
        names = [spec.name for spec in inputs.specs]
        tensors = [graph.placeholder(name) for name in names]
        pairs = zip(name_numbers(subject.numbers, names), subject.numbers, strict=True)
        numbers = [graph.placeholder(name, default_value=number.place.read()) for name, number in pairs]
        with hold_numbers(subject.numbers, numbers):
            arguments = inputs.fill(tensors)
        values: dict[fx.Node, Any] = {}
        held: dict[str, Any] = {}
        for node in model.graph.nodes:
            if node.op == "placeholder":
                # fx writes the stars of *args and **kwargs into a placeholder's target; the signature has none.
                name = str(node.target).lstrip("*")
                if name not in arguments:
                    raise TraceError(f"the graph has an input {name!r} that its forward() does not take: recompile it")
                values[node] = arguments[name]
                continue
            # Modules and tensors are not copied: stages must hold the user's own.
            if node.op in ("call_module", "get_attr"):
                held[str(node.target)] = operator.attrgetter(str(node.target))(model)
            values[node] = graph.node_copy(node, lambda n: values[n])
        gm = fetch_apart(fx.GraphModule(held, graph, class_name=subject.name))
        return Graph(gm, Scope(inputs, self.name))
