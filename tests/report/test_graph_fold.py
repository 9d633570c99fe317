"""Boxes of a plan's graph: every node in one box of its stage, few boxes, and names that say which module."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fxsplit
from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.report.graph.fold import OUTSIDE, fold_graph, fold_nodes
from tests.report.plans import COSTS, make_plan
from tests.support.graphs import node


def make_layers(count: int) -> Costs:
    """Return a chain of `count` layers of three nodes each, two in a submodule and one of the layer's own."""
    nodes: list[NodeCost] = []
    for layer in range(count):
        for part in ("up", "down", ""):
            before = [nodes[-1].name] if nodes else []
            module = f"model.layers.{layer}" + f".{part}" * bool(part)
            made = node(f"n{layer}{part}", before, 1.0 + layer % 3, output_bytes=8.0)
            nodes.append(replace(made, module=module, op="call_module:x" if part else "call_function:add"))
    return Costs(tuple(nodes), (), (nodes[-1].name,), rows=1)


@pytest.mark.parametrize("most", [1, 3, 6, 10])
@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_every_node_is_in_one_box_and_boxes_are_few(most: int, count: int) -> None:
    costs = make_layers(count)
    plan = fxsplit.plan(costs, Machine.planned(2))
    graph = fold_graph(plan, costs, most)
    boxed = [n.name for fold in graph.folds for n in fold.nodes]
    assert sorted(boxed) == sorted(costs.by_name)
    for number, stage in enumerate(plan.stages):
        own = [graph.folds[i] for i in graph.of_stage(number)]
        assert {n.name for fold in own for n in fold.nodes} == set(stage.nodes) and len(own) <= most
        assert sum(fold.ms for fold in own) == pytest.approx(stage.forward_ms + stage.backward_ms)


def test_boxes_are_modules_and_runs_of_them() -> None:
    costs = make_layers(60)
    names = [fold.name for fold in fold_nodes(0, costs.nodes, 6)]
    assert names[0] == "model.layers.0 .. 10" and len(names) == 6
    assert [fold.name for fold in fold_nodes(0, costs.nodes[:6], 4)] == ["model.layers.0", "model.layers.1.up",
        "model.layers.1.down", "model.layers.1 (n1)"]  # fmt: skip
    assert fold_nodes(0, (), 5) == []


def test_many_nodes_of_forward_are_one_box() -> None:
    nodes = [node(f"n{i}", [f"n{i - 1}"] if i else [], 1.0) for i in range(6)]
    sub = replace(node("sub", ["n5"], 1.0), module="sub", op="call_module:sub")
    names = [fold.name for fold in fold_nodes(0, [*nodes, sub], 4)]
    assert names == [OUTSIDE, "sub"]


def test_arcs_have_the_values_between_boxes() -> None:
    plan = make_plan()
    graph = fold_graph(plan, COSTS, 2)
    names = [fold.name for fold in graph.folds]
    assert names == ["layers.0", "layers.1", "layers.2", "head"]
    arcs = [(names[arc.source], names[arc.target], arc.names, arc.forward_bytes) for arc in graph.arcs]
    assert arcs[0] == ("layers.0", "layers.1", ("relu_0",), 1000.0) and len(arcs) == 3


def test_a_module_that_stages_share_is_named_by_its_node() -> None:
    """An LSTM is one module, and each of its layers is a node."""
    nodes = tuple(
        replace(node(f"layer_{i}", [f"layer_{i - 1}"] if i else [], 1.0), module="lstm", op="call_function:run")
        for i in range(2)
    )
    costs = Costs(nodes, (), ("layer_1",), rows=1)
    graph = fold_graph(fxsplit.plan(costs, Machine.planned(2)), costs)
    assert [fold.name for fold in graph.folds] == ["lstm (layer_0)", "lstm (layer_1)"]
