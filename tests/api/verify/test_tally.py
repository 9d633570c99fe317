"""verify() in a model's own dtypes: rounding is no error, and an error as small as rounding is found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.torch_internals.autograd.sums import Share, Sums
from tests.support.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 4}


class Blocks(nn.Module):
    """Has blocks in a coarse dtype between explicit casts, over a residual stream."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.a, self.h = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8 + 8 * i) for i in range(2)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)).to(self.dtype)
        for block in self.blocks:
            h = h + torch.tanh(block(h)).unflatten(1, (-1, 8)).sum(1)
        out: Tensor = self.h(h.float())
        return out


class Router(nn.Module):
    """Chooses in float32 between experts in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 4) for _ in range(3)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        share = F.softmax(self.router(x.float()), -1)
        pairs = zip(share.bfloat16().unbind(1), self.experts, strict=True)
        return torch.stack([one[:, None] * expert(x.bfloat16()) for one, expert in pairs]).sum(0)


class Head(nn.Module):
    """Has a head in float64 over a part in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x.float())).double())
        return out


class Words(nn.Module):
    """Takes whole numbers, and embeds them in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.b = nn.Embedding(10, 8).bfloat16(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.e(x).float()).mean(1)
        return out


class Casts(nn.Module):
    """Runs a part under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
        out: Tensor = self.b(torch.tanh(h.float()))
        return out


class Asks(nn.Module):
    """Takes weights in bfloat16 only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.a.weight.dtype is not torch.bfloat16:
            raise TypeError("made for bfloat16")
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


CASES: dict[str, tuple[Any, Tensor, torch.dtype]] = {
    "bfloat16 blocks": (lambda: Blocks(torch.bfloat16), torch.randn(16, 6), torch.float32),
    "float16 blocks": (lambda: Blocks(torch.float16), torch.randn(16, 6), torch.float32),
    "router": (Router, torch.randn(16, 6), torch.float32),
    "float64 input": (Router, torch.randn(16, 6, dtype=torch.float64), torch.float32),
    "float64 head": (Head, torch.randn(16, 6), torch.float64),
    "whole numbers": (Words, torch.arange(80).view(16, 5) % 10, torch.float32),
    "autocast": (Casts, torch.randn(16, 6), torch.float32),
    "all bfloat16": (lambda: Asks().bfloat16(), torch.randn(16, 6).bfloat16(), torch.bfloat16),
    "a bfloat16 model": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16(),
        torch.randn(16, 6).bfloat16(),
        torch.float64,
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, shape: torch.Size, factor: float, *, every: int = 1) -> None:
    """Make the sums of gradients of one shape wrong by a factor, once every few microbatches."""
    add, seen = Sums.add, [0]

    def wrong(gradient: Tensor) -> Tensor:
        seen[0] += 1
        return gradient if seen[0] % every else gradient * factor

    def add_wrongly(self: Sums, shares: Iterable[Share]) -> None:
        add(self, [(leaf, wrong(g) if leaf.shape == shape else g, own) for leaf, g, own in shares])

    monkeypatch.setattr(Sums, "add", add_wrongly)


@pytest.mark.parametrize("name", CASES)
def test_a_right_pipeline_is_equal_and_a_wrong_gradient_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient off by a hundredth, or without one row, is off by less than the rounding of bfloat16."""
    torch.manual_seed(0)
    build, x, dtype = CASES[name]
    model = build()
    weight, shape = next((n, p.shape) for n, p in model.named_parameters() if p.ndim > 1)
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, x)
        assert found.equal and found.dtype is dtype, found
        for factor, every in ((1.01, 1), (0.0, 4)):
            with monkeypatch.context() as patched:
                plant(patched, shape, factor, every=every)
                wrong = fxsplit.verify(pipe, x)
            assert ("gradient", weight) in {(d.kind, d.name) for d in wrong.offending}, (factor, every, wrong)


def test_a_loss_of_coarse_outputs_is_computed_as_the_pipeline_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over a microbatch rounds otherwise than a mean over the batch."""
    torch.manual_seed(0)
    x, y = torch.randn(11, 6), torch.arange(11) % 4
    with fxsplit.compile(Router(), ["cpu"] * 2, loss_fn=F.cross_entropy, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, x, target=y)
        assert found.equal and found.coarse == torch.finfo(torch.bfloat16).eps, found.offending
        plant(monkeypatch, torch.Size([3, 6]), 1.01)
        assert {d.name for d in fxsplit.verify(pipe, x, target=y).offending} == {"router.weight"}


def test_a_model_that_fails_in_its_own_dtypes_raises_its_own_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no such table")

    with fxsplit.compile(nn.Linear(6, 3), ["cpu"] * 2, passes=FAST, n_microbatches=1) as pipe:
        pipe.model.forward = Fails().forward
        with pytest.raises(KeyError, match="no such table"):
            fxsplit.verify(pipe, torch.ones(4, 6))
