"""Running statistics of batch norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from tests.models import FAST


def test_statistics_that_begin_to_move_later_move_once() -> None:
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.0), nn.Linear(8, 8)), torch.randn(8, 8)
        options: Any = {"n_microbatches": 4, "loss_fn": F.mse_loss, "passes": FAST, "example_inputs": x}
        with fxsplit.compile(model, ["cpu"] * 2, recompute=recompute, **options) as pipe:
            pipe.step(x, target=x)
            model[1].momentum = 0.1  # type: ignore[assignment]
            pipe.step(x, target=x)
        found.append(list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and float(found[0][0].abs().max()) > 0
