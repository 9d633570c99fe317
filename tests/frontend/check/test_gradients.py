"""A captured graph has the gradients of its model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.frontend.check import gradients
from fxsplit.frontend.check.gradients import Gradients, check_gradients
from tests.frontend.subjects import Scale, make_subject, trace
from tests.support.models import FAST, Reverse, Two

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class LostForInputs(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.narrow(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(Reverse.apply(x))  # type: ignore[no-untyped-call]
        out: Tensor = self.b(h.float())
        return out


class HooksInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.narrow(x)
        h = x * 1.0
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        out: Tensor = self.b(self.a(h))
        return out


class LostForFrozen(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.narrow(x)
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (LostForInputs, "Reverse is an autograd.Function called in a block of autocast"),
        (LostForFrozen, r"has another gradient for 'a\.weight'"),
        (HooksInput, "has another gradient for 'argument x'"),
    ],
)
def test_a_lost_backward_is_seen_where_nothing_is_trained_yet(build: type[Two], message: str) -> None:
    """The gradient of an input, and of a parameter that is frozen when the model is compiled."""
    model = build()
    model.a.requires_grad_(False)
    with pytest.raises(TraceError, match=message):
        fxsplit.compile(model, 2, example_inputs=rows().requires_grad_(), **OPTIONS)
    assert not model.a.weight.requires_grad and model.b.weight.requires_grad


def compare(model: nn.Module, gm: fx.GraphModule, x: Tensor) -> bool:
    with make_subject(model, x).make_runnable(len(x), gm) as here:
        return check_gradients(here).sets_hooks


class Straight(torch.autograd.Function):
    """y = 2 * x, with the gradient of y = x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Scan(torch.autograd.Function):
    """y_i = x_i + a_i * y_(i-1), written in place, which only its own backward can follow."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        b, y = a.clone(), x.clone()
        for i in range(1, x.size(1)):
            y[:, i].add_(b[:, i] * y[:, i - 1])
            b[:, i].mul_(b[:, i - 1])
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, y = ctx.saved_tensors
        of_x, of_a = gradient.clone(), torch.zeros_like(a)
        for i in range(a.size(1) - 1, 0, -1):
            of_a[:, i] = of_x[:, i] * y[:, i - 1]
            of_x[:, i - 1].add_(a[:, i] * of_x[:, i])
        return of_a, of_x


scan = Scan.apply


class Scans(Two):
    def forward(self, x: Tensor) -> Tensor:
        return scan(torch.sigmoid(self.a(x)), self.b(x))  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.long
def test_a_function_whose_apply_was_kept_has_its_own_backward() -> None:
    """Its operators write in place, and their graph would have no backward."""
    x, model = rows(), nn.Sequential(nn.Linear(4, 4), Scans(), nn.Linear(4, 4), Scans())
    with warnings.catch_warnings(), fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **OPTIONS) as pipe:
        warnings.simplefilter("error", fxsplit.FxsplitWarning)
        assert fxsplit.verify(pipe, x).equal


class Estimates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Straight.apply(x)  # type: ignore[no-untyped-call]
        return out


def test_gradients_are_compared_by_themselves() -> None:
    """Both return the same for every input, and only one has the model's backward."""
    model = Scale()
    assert not compare(model, trace(model), torch.ones(3, 4))
    graph = fx.Graph()
    graph.output(graph.call_method("mul", (graph.placeholder("x"), 2)))
    with pytest.raises(TraceError, match="another gradient for 'argument x'"):
        compare(Estimates(), fx.GraphModule({}, graph), torch.ones(3, 4))


def test_a_graph_without_a_backward_is_not_the_model() -> None:
    """It writes in place to a tensor that is saved for its backward."""

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x).exp() + 1
            return out

    model, graph = Grows(), fx.Graph()
    grown = graph.call_method("exp", (graph.call_module("a", (graph.placeholder("x"),)),))
    graph.output(graph.call_method("add_", (grown, 1)))
    with pytest.raises(TraceError, match=r"the graph of Grows has no backward, and the model has one .*in-?place"):
        compare(model, fx.GraphModule(model, graph), torch.ones(3, 4))


def test_no_gradient_is_as_good_as_zeros() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, graph.call_method("detach", (x,)))))
    adds = fx.GraphModule({}, graph)
    with pytest.raises(TraceError, match="another gradient"):
        compare(adds, trace(Doubles()), torch.ones(3, 4))
    zero = fx.Graph()
    x = zero.placeholder("x")
    zero.output((zero.call_method("mul", (x, 0)), zero.call_method("mul", (x, 2))))
    none = fx.Graph()
    x = none.placeholder("x")
    none.output((none.call_method("mul", (none.call_method("detach", (x,)), 0)), none.call_method("mul", (x, 2))))
    assert not compare(fx.GraphModule({}, zero), fx.GraphModule({}, none), torch.ones(3, 4))


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


def test_frozen_weights_are_thawed_and_frozen_again() -> None:
    model = Scale()
    model.scale.requires_grad_(False)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.mul, (x, graph.call_method("detach", (graph.get_attr("scale"),)))))
    with pytest.raises(TraceError, match="another gradient for 'scale'"):
        compare(model, fx.GraphModule(model, graph), torch.ones(3, 4))
    assert not model.scale.requires_grad


def test_gradients_are_compared_by_parts_if_memory_is_too_small_for_both_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost gradient is found among many; if no part fits, the error is torch's."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(10)))
    most, held = 20, []

    def differentiate(outputs: Any, parameters: Sequence[Tensor], leaves: Sequence[Tensor]) -> Gradients:
        held.append(len(parameters))
        if len(parameters) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(outputs, parameters, leaves)

    real = gradients.differentiate
    monkeypatch.setattr(gradients, "differentiate", differentiate)
    right, lost = fx.symbolic_trace(model), fx.symbolic_trace(model)
    last = next(node for node in lost.graph.nodes if node.target == "7.0")
    with lost.graph.inserting_before(last):
        last.args = (lost.graph.call_method("detach", last.args),)
    lost.recompile()
    for most, sizes in ((20, {20}), (19, {20, 3, 2})):
        held.clear()
        assert not compare(model, right, torch.ones(3, 4))
        assert set(held) == sizes and len(held) == (2 if most == 20 else 17)
        with pytest.raises(TraceError, match="another gradient for"):
            compare(model, lost, torch.ones(3, 4))
    most = 2
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        compare(model, right, torch.ones(3, 4))


def test_a_model_without_a_backward_is_not_asked() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    assert not compare(Counts(), trace(Counts()), torch.ones(3, 4))


def test_hooks_on_activations_are_noticed() -> None:
    def hook(x: Tensor) -> Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient)
        return y

    graph = fx.Graph()
    graph.output(graph.call_function(hook, (graph.placeholder("x"),)))
    gm = fx.GraphModule({}, graph)
    assert compare(gm, gm, torch.ones(3, 4))
