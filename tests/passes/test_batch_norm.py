"""Deferred batch norm: statistics of the whole batch, once a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from tests.models import FAST


class Twice(nn.Module):
    """One batch norm called twice, once by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(input=self.b(self.norm(self.a(x))))
        return out


def test_a_deferred_batch_norm_that_is_called_twice_counts_twice() -> None:
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(8, 8, dtype=torch.float64)
    seen: list[Tensor] = []
    other = copy.deepcopy(model)
    other.norm.register_forward_pre_hook(
        lambda m, a, k: seen.append((a[0] if a else k["input"]).detach()), with_kwargs=True
    )
    for piece in x.chunk(2):
        other(piece)
    mean = torch.zeros(8, dtype=torch.float64)
    for call in (0, 1):
        mean = 0.9 * mean + 0.1 * torch.cat(seen[call::2]).mean(0)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, ["cpu"], **options) as pipe:
        pipe.step(x, target=x)
    assert int(model.norm.num_batches_tracked) == 2  # type: ignore[arg-type]
    assert torch.allclose(model.norm.running_mean, mean, rtol=1e-10)  # type: ignore[arg-type]


def test_a_failed_step_leaves_deferred_statistics_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(8, 8)
    calls: list[int] = []

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("not now")
        return F.mse_loss(outputs, target)

    options: Any = {"n_microbatches": 4, "loss_fn": loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, **options) as pipe:
        before = [b.clone() for b in model.buffers()]
        with pytest.raises(ValueError, match="not now"):
            pipe.step(x, target=x)
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
        pipe.step(x, target=x)
        assert int(model[1].num_batches_tracked) == 1  # type: ignore[arg-type]


def test_hooks_of_a_deferred_batch_norm_are_given_the_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    seen: list[tuple[str, nn.Module]] = []
    model[1].register_forward_pre_hook(lambda m, args: seen.append(("before", m)))
    model[1].register_forward_hook(lambda m, args, kwargs, out: seen.append(("after", m)), with_kwargs=True)
    model[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append(("back", m)))
    x = torch.randn(8, 8)
    options: Any = {"n_microbatches": 2, "loss_fn": F.mse_loss, "passes": FAST, "deferred_batch_norm": True}
    with fxsplit.compile(model, 2, example_inputs=x, **options) as pipe:
        seen.clear()
        pipe.step(x, target=x)
    assert all(m is model[1] for _, m in seen)
    assert sorted(what for what, _ in seen) == ["after"] * 2 + ["back"] * 2 + ["before"] * 2
