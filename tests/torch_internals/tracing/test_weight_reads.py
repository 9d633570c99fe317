"""Weights that forward() reads without its attributes: tracing runs operators on them, and kept the results."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.torch_internals.tracing.weight_reads import refuse_weight_reads
from tests.support.models import FAST, Two


def sum_squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def add_norms(model: nn.Module) -> Tensor:
    return torch.stack([p.detach().norm() for p in model.parameters()]).sum()


def read_state(model: nn.Module) -> Tensor:
    first: Tensor = next(iter(model.state_dict().values()))
    return first.sum()


class Regularised(Two):
    def __init__(self, term: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.term = term

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out.square().mean() + 0.1 * self.term(self)


@pytest.mark.parametrize("term", [sum_squares, add_norms, read_state])
def test_a_loss_with_all_weights_in_it_trains(term: Callable[[nn.Module], Tensor]) -> None:
    """The first loss was right. Later ones kept the norm of before, or failed in a second backward."""
    model, x = Regularised(term), torch.randn(8, 4)
    unsplit = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, unsplit)]
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        for _ in range(3):
            expected = unsplit(x)
            expected.backward()
            torch.testing.assert_close(pipe.step(x), expected.detach())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_weight_is_named() -> None:
    model = Two()
    with refuse_weight_reads(model):
        torch.ones(3).sum()
        with pytest.raises(TraceError, match=r"Two computes with 'a\.weight'.*self\.fc\.weight"):
            model.a.weight.detach().view(-1).sum()
    model.a.weight.detach().view(-1).sum()
