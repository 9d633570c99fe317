"""After carry-tensors only tensors cross stages, with the same results; other values are refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxsplit.errors import NotExportable
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.stages import Stage, Stages
from fxsplit.ir.graph import IR
from fxsplit.passes import CarryTensors


class Whole(nn.Module):
    """A model with a weight, from which the tests make graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


def cut(*builders: Callable[..., Any]) -> IR:
    """Return the IR of stages that are traced from functions; each names its outputs as its nodes."""
    model = Whole()
    x = torch.randn(2, 3, 4)
    stages, takes = [], ("x",)
    for index, builder in enumerate(builders):
        graph = fx.Graph()
        given = [graph.placeholder(name) for name in takes]
        made = builder(*given)
        graph.output(tuple(made))
        gives = tuple(node.name for node in made)
        module = fx.GraphModule({"linear": model.linear}, graph, class_name=f"Stage{index}")
        stages.append(Stage(index, f"cpu:{index}", torch.device("cpu"), module, takes, gives))
        takes = gives
    made_stages = Stages(tuple(stages), None)
    inputs, tensors = Inputs.of(model, (x,), {})
    return IR(made_stages.call_in_turn("Whole")).learn(made_stages, Example(inputs, tuple(tensors)))


def call(target: Any, *args: Any) -> fx.Node:
    (first, *_) = (a for a in args if isinstance(a, fx.Node))
    return first.graph.call_function(target, args)


def method(name: str, *args: Any) -> fx.Node:
    first: fx.Node = args[0]
    return first.graph.call_method(name, args)


def check_same(ir: IR, made: IR) -> Stages:
    """Compare both graphs on the example; return the new stages, between which only tensors cross."""
    (x,) = ir[Example].tensors
    found: Any = x
    values: Any = (x,)
    for stage in ir[Stages].stages:
        values = stage(*values)
    found = (x,)
    for stage in made[Stages].stages:
        found = stage(*found)
        assert all(isinstance(v, Tensor) for v in found)
    assert len(found) == len(values) and all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
    made[Stages].verify(made)
    return made[Stages]


def test_a_size_is_read_from_a_tensor_that_arrives() -> None:
    """Two stages later, by way of a product; the stage between hands nothing on."""
    ir = cut(
        lambda x: (x, call(operator.mul, method("size", x, 0), 2)),
        lambda x, mul: (method("relu", x), mul, x),
        lambda relu, mul, x: (call(torch.mul, relu, mul), x),
    )
    stages = check_same(ir, CarryTensors()(ir))
    assert [s.outputs for s in stages.stages[:2]] == [("x",), ("relu", "x")]
    assert "size" not in stages[1].code and "x.size(0)" in stages[2].code


def test_a_size_of_what_does_not_arrive_is_written_down() -> None:
    ir = cut(
        lambda x: (method("flatten", x), method("size", x)),
        lambda flatten, size: (method("view", flatten, size),),
    )
    stages = check_same(ir, CarryTensors()(ir))
    assert stages[1].inputs == ("flatten",)
    assert "view" in stages[1].code and "size" not in stages[1].code


def test_stages_that_carry_tensors_stay_themselves() -> None:
    ir = cut(lambda x: (method("relu", x),), lambda relu: (method("tanh", relu),))
    assert CarryTensors()(ir) is ir
    ir = cut(
        lambda x: (method("relu", x), method("size", x, 1)),
        lambda relu, size: (call(torch.mul, relu, size),),
        lambda mul: (method("tanh", mul),),
    )
    assert CarryTensors()(ir)[Stages][2] is ir[Stages][2]


def test_a_number_that_nobody_reads_is_dropped() -> None:
    ir = cut(
        lambda x: (method("relu", x), method("item", method("sum", x))),
        lambda relu, item: (relu, item),
        lambda relu, item: (method("tanh", relu),),
    )
    stages = check_same(ir, CarryTensors()(ir))
    assert [s.inputs for s in stages.stages] == [("x",), ("relu",), ("relu",)]


def test_what_values_decide_is_refused() -> None:
    ir = cut(
        lambda x: (x, method("item", method("sum", x))),
        lambda x, item: (call(torch.mul, x, item),),
    )
    with pytest.raises(NotExportable, match=r"value 'item', a .*, crosses into stage 1, and .* pin its maker"):
        CarryTensors()(ir)


def test_tensors_in_a_tuple_are_refused() -> None:
    ir = cut(lambda x: (x, method("unbind", x)), lambda x, unbind: (call(torch.stack, unbind), x))
    with pytest.raises(NotExportable, match="value 'unbind', a tuple of tensors, crosses into stage 1"):
        CarryTensors()(ir)


def test_a_boundary_without_tensors_and_a_result_that_is_none_are_refused() -> None:
    ir = cut(lambda x: (method("size", x),), lambda size: (size.graph.call_function(torch.zeros, (size,)),))
    with pytest.raises(NotExportable, match="no tensor crosses from stage 0 to stage 1"):
        CarryTensors()(ir)
    ir = cut(lambda x: (x,), lambda x: (x, method("size", x)))
    with pytest.raises(NotExportable, match="the model returns 'size', a Size"):
        CarryTensors()(ir)


def test_a_stage_may_have_been_given_other_names() -> None:
    """Values need not be called as their nodes are."""
    ir = cut(lambda x: (method("relu", x), method("size", x, 0)), lambda relu, size: (call(torch.mul, relu, size),))
    first, second = ir[Stages].stages
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output((graph.call_function(torch.mul, (a, b)),))
    module = fx.GraphModule(nn.Module(), graph)
    other = Stages((replace(first, outputs=("a", "b")), replace(second, module=module, inputs=("a", "b"))), None)
    ir = ir.rewrite(other.call_in_turn("Whole")).learn(other)
    stages = check_same(ir, CarryTensors()(ir))
    assert stages[1].inputs == ("a",)
