"""The graph as text: every graph comes back, and wrong lines are named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import IRSyntaxError
from fxsplit.ir.text.graph import FunctionName, PlainGraph, PlainNode, read_graph, write_graph
from fxsplit.ir.text.tokens import Tokens
from tests.ir.text.test_values import values

GRAPH = """graph Net {
  %x = input x() : float32[4, 8]
  %w = attribute layer.weight()
  %a = module layer(%x) : float32[4, 8]  ; Linear(in_features=8, out_features=8, bias=True)
  %pad = function torch.nn.functional.pad(%a, (1, 1), mode="constant") in "block.0" : float32[4, 10]
  %sum_1 = method sum(%pad, [-1], keepdim=true)
  return {"out": %sum_1, "all": (%a, none)}
}"""


def read(text: str) -> PlainGraph:
    """Return the graph that is all of a text."""
    return read_graph(Tokens(text, "a.ir"))


def test_a_graph_comes_back() -> None:
    graph = read(GRAPH)
    assert write_graph(graph) == GRAPH
    pad = graph.nodes[3]
    assert pad.op == "call_function" and pad.target == FunctionName("torch.nn.functional.pad")
    assert pad.kwargs == {"mode": "constant"} and pad.module == "block.0" and pad.made == "float32[4, 10]"
    assert graph.nodes[2].comment == "Linear(in_features=8, out_features=8, bias=True)"
    assert [n.name for n in graph.nodes[-1].all_input_nodes] == ["sum_1", "a"]
    assert "float32" not in write_graph(graph, shapes=False) and "Linear" not in write_graph(graph, shapes=False)


names = st.text(min_size=1, max_size=5)


@st.composite
def graphs(draw: st.DrawFn) -> PlainGraph:
    """Draw a graph: any names, kinds and arguments; nodes read any earlier ones."""
    graph = PlainGraph(draw(names))
    for name in draw(st.lists(names, unique=True, min_size=1, max_size=6)):
        op = draw(st.sampled_from(["placeholder", "get_attr", "call_module", "call_function", "call_method"]))
        known: Any = st.sampled_from(graph.nodes) if graph.nodes else st.none()
        inner = st.one_of(values, known, st.lists(known, max_size=2), st.tuples(known, values))
        words = {"get_attr": "layers.0.weight", "call_module": "layers.0", "placeholder": "x", "call_method": "sum"}
        target = draw(names) if op == "call_function" else words[op]
        node = PlainNode(name, op, FunctionName(target) if op == "call_function" else target, (), {})
        node.args = tuple(draw(st.lists(inner, min_size=1, max_size=3)))
        node.kwargs = draw(st.dictionaries(st.sampled_from(["dim", "keepdim", "dtype"]), inner, max_size=2))
        node.module = draw(st.sampled_from(["", "layer.0", "a b"]))
        node.made = draw(st.sampled_from(["", "float32[2, 3]", "tuple"]))
        node.comment = draw(st.sampled_from(["", "Linear(in_features=8)", 'ReLU() @ "net.py", line 3']))
        graph.nodes.append(node)
    graph.nodes.append(PlainNode("output", "output", "output", (draw(st.lists(st.sampled_from(graph.nodes))),), {}))
    return graph


@given(graphs())
def test_every_graph_comes_back(graph: PlainGraph) -> None:
    text = write_graph(graph)
    again = read(text)
    assert write_graph(again) == text
    assert [(n.name, n.op, n.target) for n in again.nodes] == [(n.name, n.op, n.target) for n in graph.nodes]
    reads = [[m.name for m in n.all_input_nodes] for n in graph.nodes]
    assert [[m.name for m in n.all_input_nodes] for n in again.nodes] == reads


def test_names_of_functions() -> None:
    assert FunctionName("torch.ops.aten.view.default").__name__ == "view.default"
    assert FunctionName("operator.add").__name__ == "add" and FunctionName("len").__name__ == "len"
    assert FunctionName("unknown.view.default").__name__ == "view.default"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("%a = module layer(%y)", "a.ir:3:21: no node 'y' before this line"),
        ("%x = input x()", "a.ir:3:3: there are two nodes 'x': give each a name of its own"),
        (
            "%a = layer layer(%x)",
            "a.ir:3:8: 'layer' is no kind of node: give input, attribute, module, function, method",
        ),
        ("%a = module layer(%x", "a.ir:4:3: a comma or '\\)' is missing before 'return'"),
        ("%a = module layer(%x) %x", "a.ir:3:25: a node ends before '%x': put it on a line of its own"),
        ("%a module layer(%x)", "a.ir:3:6: a node needs '=' here, and not 'module'"),
        ("a = module layer(%x)", "a.ir:3:3: a node or 'return' must begin this line, and not 'a'"),
        ("%a = method add(%x, one)", "a.ir:3:23: 'one' is no value: put a text in quotes"),
        ("%a = method add(%x, b=1, 2)", "an argument without a name comes after one with a name"),
        ("%a = method add(%x, b=1, b=2)", "'b' is no name of an argument, or appears twice"),
        ("return %x\n  %a = input a()", "'return' is the last line of a graph"),
    ],
)
def test_wrong_lines_are_named(line: str, error: str) -> None:
    with pytest.raises(IRSyntaxError, match=error):
        read(f"graph Net {{\n  %x = input x()\n  {line}\n  return %x\n}}")


def test_a_graph_must_return() -> None:
    with pytest.raises(IRSyntaxError, match="the graph does not return"):
        read("graph Net {\n  %x = input x()\n}")
    with pytest.raises(IRSyntaxError, match="a graph needs 'graph' here, and not 'grpah'"):
        read("grpah Net {")
