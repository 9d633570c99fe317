"""Running a graph: a failure names the node, and shapes are noted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx

from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.check.run import Runner, describe, summarize
from tests.frontend.subjects import Scale, trace


def test_shapes_are_noted_in_the_original_of_a_copy() -> None:
    gm = trace(Scale())
    Runner(copy.deepcopy(gm), noted=gm).run(torch.ones(2, 4))
    assert {n.meta["fxsplit_shape"] for n in gm.graph.nodes if n.op == "call_function"} == {"float32[2, 4]"}
    other = trace(Scale())
    Runner(other).run(torch.ones(2, 4))
    assert not any("fxsplit_shape" in n.meta for n in other.graph.nodes)


def test_a_node_that_fails_is_named_with_its_submodule() -> None:
    graph = fx.Graph()
    node = graph.call_method("frobnicate", (graph.placeholder("x"),))
    node.meta["nn_module_stack"] = {"a": ("", object), "b": ("inner", object)}
    graph.output(node)
    with pytest.raises(TraceError, match=r"node 'frobnicate' .*fxsplit.leaf\('inner'\)") as caught:
        Runner(fx.GraphModule({}, graph)).run(torch.ones(1))
    assert caught.value.submodule == "inner"


def test_errors_of_fxsplit_pass_as_they_are() -> None:
    def refuse(x: object) -> None:
        raise InputError("as it is")

    graph = fx.Graph()
    graph.output(graph.call_function(refuse, (graph.placeholder("x"),)))
    with pytest.raises(InputError, match="as it is"):
        Runner(fx.GraphModule({}, graph)).run(torch.ones(1))


def test_values_and_errors_in_a_few_words() -> None:
    assert describe(torch.ones(2, 3, dtype=torch.int64)) == "int64[2, 3]" and describe("text") == "str"
    assert summarize(ValueError("\n first\nsecond")) == "first" and summarize(ValueError()) == "ValueError"
