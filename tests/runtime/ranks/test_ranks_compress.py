"""Compressed cuts over ranks: bit for bit like threads, with fewer bytes sent, also in asynchronous schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.ir.facts.costs.compress import Compress
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.models import FAST
from tests.support.ranks import ranks

X = torch.randn(12, 64)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))


def train(devices: Any, how: Compress, schedule: str, costs: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of two steps, and the weights and gradients that are here afterwards."""
    model = make_model()
    x, y = torch.randn(12, 64), torch.randn(12, 64)
    options: dict[str, Any] = {"n_microbatches": 6, "schedule": schedule, "costs": costs, "passes": FAST}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with fxsplit.compile(
        model, devices, example_inputs=x, loss_fn=nn.functional.mse_loss, compress=how, **options
    ) as pipe:
        assert pipe.plan.compress == how
        between: dict[str, Any] = {"optimizer": optimizer} if schedule.startswith("PipeDream") else {}
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(float(pipe.step(x, target=y, **between)))
            if not between:
                optimizer.step()
    own = {name: weight for name, weight in model.named_parameters() if not is_remote(weight)}
    state = {name: weight.detach().clone() for name, weight in own.items()}
    return losses, state | {f"{k}.grad": p.grad.clone() for k, p in own.items() if p.grad is not None}


def train_rank(rank: int, n: int, how: Compress, schedule: str, costs: str) -> Any:
    return train("world", how, schedule, costs)


@pytest.mark.parametrize(
    ("n", "how", "schedule"),
    [
        (2, "int8", "1F1B"),
        (2, "bf16", "ZBVZeroBubble"),
        (2, "int8", "PipeDream"),
        (3, "bf16", "PipeDream-2BW"),
        (3, "int8", "1F1B"),
        pytest.param(3, "bf16", "PipeDream", marks=pytest.mark.long),
        pytest.param(2, "int8", "PipeDream-2BW", marks=pytest.mark.long),
    ],
)
def test_ranks_compress_as_threads_do(n: int, how: Compress, schedule: str, tmp_path: Any) -> None:
    costs = str(tmp_path / "costs.json")
    fxsplit.profile(make_model(), X, n_microbatches=6, device="cpu", repeats=1).save(costs)
    found = ranks(n, train_rank, how, schedule, costs)
    losses, state = train(["cpu"] * n, how, schedule, costs)
    assert [one[0] for one in found] == [losses] * n
    told = {name: value for one in found for name, value in one[1].items()}
    assert told.keys() == state.keys() and all(torch.equal(told[k], state[k]) for k in state)
