"""Calls of autograd.Functions: recorded as nodes, or marked by operators and put back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.autograd_functions import enter, leave, mark_functions, record_functions
from tests.support.models import FAST


class Thirds(torch.autograd.Function):
    """Returns x * factor and x, with a backward that no graph could know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * factor, y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3, None, gradients[1] * 5


class Uses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = Thirds.apply(x, 0.5, x)  # type: ignore[no-untyped-call]
        out: Tensor = a + b
        return out


def test_a_traced_call_is_one_node_that_has_the_backward() -> None:
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()
    tracer.root = nn.Module()
    x = tracer.create_proxy("placeholder", "x", (), {})
    with record_functions(lambda call, args, kwargs: tracer.create_proxy("call_function", call, args, kwargs)):
        first = Thirds.apply(x, 0.5, x)  # type: ignore[no-untyped-call]
        again = Thirds.apply(x, 0.5, x)  # type: ignore[no-untyped-call]
        plain = Thirds.apply(torch.ones(1), 0.5, torch.ones(1))  # type: ignore[no-untyped-call]
    assert isinstance(plain[0], Tensor), "a call on tensors is no node"
    assert first.node.target is again.node.target, "graphs are compared by their targets"
    value = torch.ones(2, requires_grad=True)
    scaled, same = first.node.target(value, 0.5, value)
    (scaled + same).sum().backward()
    assert value.grad is not None and value.grad.tolist() == [8.0, 8.0]


def test_a_marked_call_becomes_a_function_of_its_tensors() -> None:
    x = torch.ones(2)
    with mark_functions() as calls:
        found = Uses()(x)
    assert torch.equal(found, x * 1.5) and len(calls) == 1 and calls[0].__name__ == "Thirds"
    one, two = torch.full((2,), 4.0, requires_grad=True), torch.full((2,), 6.0, requires_grad=True)
    scaled, same = calls[0](one, two)
    assert scaled.tolist() == [2.0, 2.0] and same.tolist() == [6.0, 6.0]
    torch.autograd.backward([scaled.sum(), same.sum()])
    assert one.grad is not None and two.grad is not None
    assert (one.grad.tolist(), two.grad.tolist()) == ([3.0, 3.0], [5.0, 5.0])


class Halves(torch.autograd.Function):
    """Has a context of its own, and a number with a default."""

    @staticmethod
    def forward(x: Tensor, factor: float = 0.5) -> Tensor:
        return torch.sin(x) * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor * 7, None


halve: Any = Halves.apply  # as torch's own tutorials have it


class UsesKept(nn.Module):
    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.a, self.b, self.act, self.decides = nn.Linear(4, 4), nn.Linear(4, 4), halve, decides

    def forward(self, x: Tensor) -> Tensor:
        if self.decides and x.shape[1] > 4:
            return x
        out: Tensor = self.b(self.act(halve(self.a(x), 0.25)))
        return out


@pytest.mark.parametrize("decides", [False, True])
def test_a_function_that_was_kept_before_is_recorded(decides: bool) -> None:
    """`act = Act.apply` was no patch of it, so that the function's own backward was lost, and the model refused."""
    torch.manual_seed(0)
    model, x = UsesKept(decides).double(), torch.randn(6, 4).double()
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        grads = (torch.autograd.grad(out.square().sum(), [*model.parameters()]) for out in (pipe(x), model(x)))
        for found, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_marks_carry_the_numbers_of_call_and_output() -> None:
    seen: list[tuple[Any, tuple[int, ...]]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (enter, leave):
                seen.append((func, args[1:]))
            return func(*args, **(kwargs or {}))

    with mark_functions(), Watch():  # type: ignore[no-untyped-call]
        Uses()(Uses()(torch.ones(2)))
    entered, left = [n for f, n in seen if f is enter], [n for f, n in seen if f is leave]
    assert entered == [(0,), (0,), (1,), (1,)] and left == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_other_threads_call_as_ever() -> None:
    found: list[Tensor] = []
    with mark_functions() as calls:
        thread = threading.Thread(target=lambda: found.append(Uses()(torch.ones(2))))
        thread.start()
        thread.join()
    assert not calls and found[0].tolist() == [1.5, 1.5]


def test_reentrant_checkpoints_are_refused() -> None:
    with mark_functions(), pytest.raises(TraceError, match=r"checkpoint\(use_reentrant=True\)"):
        checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=True)
