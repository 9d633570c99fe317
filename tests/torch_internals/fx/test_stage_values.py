"""Values of the nodes of stages are recorded, from shapes if possible, without side effects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxsplit.torch_internals.fake.values import is_fake
from fxsplit.torch_internals.fake.without_weights import without_weights
from fxsplit.torch_internals.fx.stage_values import list_outputs, record_values


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.norm(self.linear(x)), x.shape[0]


def test_shapes_gradients_and_numbers_are_known() -> None:
    first, second = fx.symbolic_trace(Normed()), fx.symbolic_trace(nn.Tanh())
    given = list_outputs(first)
    assert [node.name for node in given] == ["norm", "getitem"]
    graph = fx.Graph()
    a, _ = graph.placeholder("a"), graph.placeholder("n")
    graph.output((graph.call_module("tanh", (a,)),))
    second = fx.GraphModule({"tanh": nn.Tanh()}, graph)
    before = {name: value.clone() for name, value in first.state_dict().items()}
    one, two = record_values([first, second], [torch.randn(5, 3)])
    assert one[given[1]] == 5 and tuple(one[given[0]].shape) == (5, 3) and one[given[0]].requires_grad
    assert is_fake(one[given[0]]) and not one[next(iter(first.graph.nodes))].requires_grad
    assert two[list_outputs(second)[0]].requires_grad
    assert all(torch.equal(value, before[name]) for name, value in first.state_dict().items())


def test_what_reads_values_is_run_with_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    count = graph.call_function(int, (graph.call_method("item", (graph.call_method("sum", (x,)),)),))
    graph.output((graph.call_function(torch.narrow, (x, 0, 0, count)),))
    module = fx.GraphModule(nn.Module(), graph)
    (values,) = record_values([module], [torch.tensor([1.0, 1.0, 0.0])])
    assert values[list_outputs(module)[0]].tolist() == [1.0, 1.0]
    with without_weights():
        model = nn.Linear(3, 3)
    held = fx.GraphModule({"a": model}, graph)
    held.add_submodule("a", model)
    with pytest.raises(GuardOnDataDependentSymNode, match="data-dependent"):
        record_values([held], [torch.tensor([1.0, 1.0, 0.0])])
