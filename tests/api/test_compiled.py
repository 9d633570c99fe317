"""Training and evaluation share weights, whatever each mode's graph does with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from tests.models import FAST


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Smaller(nn.Module):
    """Has fewer nodes in evaluation than devices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            first: Tensor = self.a(x)
            return first
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return result


def test_a_mode_with_fewer_nodes_than_devices() -> None:
    model = Smaller()
    x = vectors()
    with fxsplit.compile(model, 4, example_inputs=x, passes=FAST) as pipe:
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))
        assert "(passes values on)" in str(pipe.plan)


class TwoWays(nn.Module):
    """Uses one weight as a module in training and as a plain tensor in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = self.b(x) if self.training else F.linear(x, self.b.weight, self.b.bias)
        result: Tensor = self.c(torch.tanh(x))
        return result


@pytest.mark.parametrize("first", [True, False])
def test_weights_stay_where_they_are_however_a_mode_reaches_them(first: bool) -> None:
    model = TwoWays().train(first)
    x = vectors()
    with fxsplit.compile(model, 3, example_inputs=x, passes=FAST) as pipe:
        homes = [{id(w) for w in s.module.parameters()} for s in pipe.stages.stages]
        torch.testing.assert_close(pipe.train(not first)(x), model(x))
        assert [{id(w) for w in s.module.parameters()} for s in pipe.stages.stages] == homes
