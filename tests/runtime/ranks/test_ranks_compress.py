"""Compressed cuts over ranks: bit for bit those of threads, with fewer bytes on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.torch_internals.away import is_away
from tests.models import FAST
from tests.ranks import ranks

X = torch.randn(8, 64)


def train(devices: Any, how: str, schedule: str, costs: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    options: dict[str, Any] = {"n_microbatches": 4, "schedule": schedule, "costs": costs, "passes": FAST}
    with fxsplit.compile(
        model, devices, example_inputs=x, loss_fn=nn.functional.mse_loss, compress=how, **options
    ) as pipe:
        assert pipe.plan.compress == how
        losses = [float(pipe.step(x, target=y)) for _ in range(2)]
    own = {k: p.grad for k, p in model.named_parameters() if not is_away(p) and p.grad is not None}
    return losses, {k: gradient.clone() for k, gradient in own.items()}


def train_rank(rank: int, n: int, how: str, schedule: str, costs: str) -> Any:
    return train("world", how, schedule, costs)


@pytest.mark.parametrize(("how", "schedule"), [("int8", "1F1B"), ("bf16", "ZBVZeroBubble")])
def test_ranks_compress_as_threads_do(how: str, schedule: str, tmp_path: Any) -> None:
    costs = str(tmp_path / "costs.json")
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    fxsplit.profile(model, X, n_microbatches=4, device="cpu", repeats=1).save(costs)
    found = ranks(2, train_rank, how, schedule, costs, limit_s=90)
    losses, gradients = train(["cpu"] * 2, how, schedule, costs)
    assert [one[0] for one in found] == [losses, losses]
    told = found[0][1] | found[1][1]
    assert set(told) == set(gradients) and all(torch.equal(told[k], gradients[k]) for k in gradients)
