"""Nodes that write in place keep their order, and stay together where the order cannot be kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.compare import compare, run_pipeline_step, run_unsplit_step
from tests.models import FAST

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class RunningMean(nn.Module):
    """Updates a buffer in the first layer and reads it in the last: a later microbatch must not overtake the reader."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.mean.mul_(0.9).add_(x.detach().mean(dim=0))
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(x)))) * self.mean
        return result


class ReadsNorm(nn.Module):
    """Reads the statistics that batch norm writes, in another node."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(x) + self.norm.running_mean)
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result


@pytest.mark.parametrize("model", [RunningMean, ReadsNorm])
def test_a_written_buffer_is_read_in_time(model: type[nn.Module]) -> None:
    split = model().double()
    x, y = vectors(64).double(), vectors(64).double()
    with fxsplit.compile(split, 2, example_inputs=x, n_microbatches=16, loss_fn=mse, passes=FAST) as pipe:
        for _ in range(5):
            expected = run_unsplit_step(copy.deepcopy(split), [x], y, mse, 16)
            found = compare(run_pipeline_step(pipe, [x], y), expected)
            assert found.largest <= 1e-10, f"{found} at {found.worst}"
            pipe.zero_grad()
