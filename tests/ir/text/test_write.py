"""The IR as text: every kind of node and argument."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx, nn

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.graph import IR, Fact, Step
from fxsplit.ir.text.write import render
from tests.support.graphs import node


def test_each_kind_of_node() -> None:
    root = nn.Module()
    root.layer, root.weight = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["fxsplit_shape"] = "float32[4, 2]"
    weight, layer = graph.get_attr("weight"), graph.call_module("layer", (x,))
    added = graph.call_function(operator.add, (layer, weight))
    joined = graph.call_function(nn.functional.pad, ([x, added],), {"dim": -1})
    cut = graph.call_function(operator.getitem, (joined, (slice(None, weight, 2), 0)))
    graph.output({"out": graph.call_method("sum", (cut, "all"))})
    text = render(IR(fx.GraphModule(root, graph), steps=(Step("profile", 0.5), Step("order", 0.5))))
    assert text.split("\n") == [
        "fxsplit-ir 1",
        "mode train",
        "step profile",
        "step order",
        "",
        "graph GraphModule {",
        "  %x = input x() : float32[4, 2]",
        "  %weight = attribute weight()",
        "  %layer = module layer(%x)  ; Linear(in_features=2, out_features=2, bias=True)",
        "  %add = function operator.add(%layer, %weight)",
        "  %pad = function torch.nn.functional.pad([%x, %add], dim=-1)",
        "  %getitem = function operator.getitem(%pad, (slice(none, %weight, 2), 0))",
        '  %sum_1 = method sum(%getitem, "all")',
        '  return {"out": %sum_1}',
        "}",
        "",
    ]


def test_facts_follow_in_their_order() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    costs = Costs((node("a"),), (), ("a",), rows=1)
    text = render(IR(fx.GraphModule({}, graph)).learn(costs, Seen()))
    assert (
        text.index("graph GraphModule") < text.index("\n\nfact Costs {\n") < text.index("; fact Seen of Costs\n; twice")
    )


@dataclass(frozen=True)
class Seen(Fact):
    """A fact without a record: it stands in the text as a comment."""

    made_by: ClassVar[str] = "look"
    derives_from: ClassVar[tuple[type, ...]] = (Costs,)

    def verify(self, ir: IR) -> None:
        """Accept every graph."""
        return

    def __str__(self) -> str:
        return "twice\n\nnever"


def test_a_function_without_a_name_goes_by_its_type() -> None:
    class Scale:
        __name__ = "scale"

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    graph = fx.Graph()
    graph.output(graph.call_function(Scale(), (graph.placeholder("x"),)))
    assert f"%scale = function {Scale.__module__}.Scale(%x)" in render(IR(fx.GraphModule({}, graph)))
