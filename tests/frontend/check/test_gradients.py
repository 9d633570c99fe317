"""Gradients of a captured graph are those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from tests.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Two(nn.Module):
    """Two layers; `narrow` sends a model to torch.export, since it decides by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def narrow(self, x: Tensor) -> None:
        if x.shape[-1] != 4:
            raise ValueError("four features")


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


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
