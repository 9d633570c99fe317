"""Code of graphs that is generated late: the same code, and only when something reads it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.tracing.late_code import GENERATED, generate_code_late
from tests.torch_internals.tracing.test_symbolic_sizes import export

X = torch.randn(3, 4)


def make(function: Callable[..., Any] = torch.tanh) -> fx.GraphModule:
    """Return a module of one layer and one function."""
    torch.manual_seed(0)
    graph = fx.Graph()
    hidden = graph.call_module("layer", (graph.placeholder("x"),))
    graph.output(graph.call_function(function, (hidden,)))
    return fx.GraphModule({"layer": nn.Linear(4, 2)}, graph)


def count_generated(run: Callable[[], object]) -> int:
    """Return how many times code of a graph is generated while something runs."""
    graphs: list[fx.Graph] = []

    def note(own: Method, graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        graphs.append(graph)
        return own(graph, *args, **kwargs)

    with patch_method(fx.Graph, "python_code", lambda own: partial(note, own)):
        run()
    return len(graphs)


@pytest.mark.parametrize(
    "look",
    [
        lambda module: module(X),
        lambda module: module.forward(X),
        lambda module: module.code,
        lambda module: type(module).forward(module, X),
        lambda module: inspect.signature(module.forward),
        lambda module: copy.deepcopy(module)(X),
        lambda module: copy.copy(module)(X),
        str,
    ],
    ids=["call", "forward", "code", "class", "signature", "deepcopy", "copy", "str"],
)
def test_whoever_looks_finds_the_code(look: Callable[[fx.GraphModule], Any]) -> None:
    plain = make()
    with generate_code_late():
        inside, after = make(), make()
        assert str(look(inside)) == str(look(plain))
    assert str(look(after)) == str(look(plain)) and after.code == plain.code
    assert not any(name in vars(type(after)) for name in GENERATED[1:])


def test_a_changed_graph_is_run_as_it_was_changed() -> None:
    module = make()
    module(X)
    with generate_code_late():
        for node in module.graph.nodes:
            if node.target is torch.tanh:
                node.target = torch.cos
        assert count_generated(module.recompile) == 0
        assert "cos" in module.code and torch.equal(module(X), make(torch.cos)(X))
    assert count_generated(module.recompile) == 1


def test_modules_inside_have_code_of_their_own() -> None:
    with generate_code_late():
        graph = fx.Graph()
        graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
        outer = fx.GraphModule({"inner": make()}, graph)
    assert count_generated(lambda: outer(X)) == 2
    assert torch.equal(outer(X), make()(X))


def test_exporting_generates_no_code_that_nobody_runs() -> None:
    """It was generated 12 times and more, for each pass that torch.export makes over the graph."""
    assert count_generated(export) > 3

    def export_late() -> None:
        with generate_code_late():
            export()

    assert count_generated(export_late) == 0


def test_an_exported_program_runs_afterwards() -> None:
    x = torch.randn(2, 13, 4)
    with generate_code_late():
        late = export().module()
    assert torch.equal(late(x), export().module()(x))
