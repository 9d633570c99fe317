"""The graph written from an exported program computes the same as the model, with the model's own modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.autograd_functions import mark_functions
from fxsplit.frontend.front_ends.export.inline import GraphWriter
from tests.support.models import FAST, Reverse


def write(model: nn.Module, x: Tensor) -> fx.GraphModule:
    with mark_functions() as functions:
        program = torch.export.export(model, (x,), strict=False)
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule) and program.call_spec.out_spec is not None
    writer = GraphWriter(module, model, functions, [])
    writer.write_program(["x"], program.call_spec.out_spec)
    return fx.GraphModule(writer.held, writer.graph)


def check(model: nn.Module, gm: fx.GraphModule) -> None:
    """Compare values and the gradients of an input."""
    x = torch.randn(3, 4)
    before = {name: b.clone() for name, b in model.named_buffers()}
    left = []
    for run in (model, gm):
        model.load_state_dict(before, strict=False)
        given = x.clone().requires_grad_()
        out = run(given)
        (gradient,) = torch.autograd.grad(out.square().sum(), given)
        left.append((out, gradient, [b.clone() for b in model.buffers()]))
    torch.testing.assert_close(*left, rtol=0, atol=0)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.tied = self.a

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))[:]
        with torch.no_grad():
            scale, same = torch.softmax(h, -1), h
        with torch.autocast("cpu", torch.bfloat16):
            low = self.tied(h)
        out: Tensor = Reverse.apply(h * scale + same) + low.float()  # type: ignore[no-untyped-call]
        return out


class Asserts(nn.Module):
    """Refuses values at each call, in a way that a graph can hold, as distributions do since torch 2.15."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # which symbolic tracing cannot follow
            positive = (x > 0).all()
        torch._assert_async(positive, "x must be positive")
        out: Tensor = self.b(self.a(x))
        return out


def test_a_check_of_values_stays_in_the_graph() -> None:
    """The check used to be removed along with checks of sizes, and the pipeline took values that the model refuses."""
    model, x = Asserts(), torch.rand(8, 4) + 0.1
    gm = write(model, x)
    torch.testing.assert_close(gm(x), model(x))
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=4, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        for run in (model, gm, pipe):
            with pytest.raises(RuntimeError, match="x must be positive"):
                run(-x)


def test_the_graph_is_the_model_in_larger_pieces() -> None:
    model = Everything()
    gm = write(model, torch.randn(3, 4))
    check(model, gm)
    assert gm.get_submodule("norm") is model.norm and gm.get_parameter("a.weight") is model.a.weight
    called = [str(n.target) for n in gm.graph.nodes if n.op == "call_module"]
    assert called == ["norm", "region_1"]
    names = [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function" and hasattr(n.target, "__name__")]
    assert names.count("Reverse") == 1 and not [n for n in names if n.startswith(("enter", "leave", "clone", "slice"))]
    fetched = [n for n in gm.graph.nodes if n.op == "get_attr"]
    assert {n.target for n in fetched} == {"a.weight", "a.bias"} and all(len(n.users) == 1 for n in fetched)
    assert all(n.meta for n in gm.graph.nodes if n.op == "call_module"), "the notes of a node are handed on"


def test_a_weight_is_fetched_by_each_of_its_users() -> None:
    """A fetch that two stages share would tie them together."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(self.a(x))
            return out

    model = Twice()
    gm = write(model, torch.randn(3, 4))
    check(model, gm)
    assert [n.target for n in gm.graph.find_nodes(op="get_attr")] == ["a.weight"] * 2


def test_a_constant_and_a_write_are_kept() -> None:
    class Writes(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x * torch.tensor([1.0, 2.0, 3.0, 4.0])

    model = Writes()
    gm = write(model, torch.randn(3, 4))
    check(model, gm)
    assert next(n.target for n in gm.graph.nodes if n.op == "call_function") is torch.ops.aten.add_.Tensor
    assert any(str(n.target).startswith("constant_") for n in gm.graph.find_nodes(op="get_attr"))


def test_a_function_in_a_region_is_refused() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = Reverse.apply(x)  # type: ignore[no-untyped-call]
            return out

    with pytest.raises(TraceError, match=r"Reverse is an autograd\.Function called in a block of autocast"):
        write(Inside(), torch.randn(3, 4))
