"""A step that bypasses DistributedDataParallel warns; a call of the wrapper sums gradients over ranks."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxsplit
from fxsplit.errors import FxsplitWarning
from fxsplit.torch_internals.distributed.data_parallel import warn_of_lone_step
from tests.support.models import FAST
from tests.support.ranks import ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_batch(rank: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 4, generator=numbers, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def train(rank: int, n: int, how: str) -> tuple[list[Tensor], list[str]]:
    """Return the gradients that one way of training leaves on a rank, and the warnings that it gives."""
    x, y = make_batch(rank)
    model = make_model()
    with (
        warnings.catch_warnings(record=True) as seen,
        fxsplit.compile(model, 2, loss_fn=F.mse_loss, passes=FAST) as pipe,
    ):
        warnings.simplefilter("always")
        around = nn.Sequential(pipe) if how == "inside" else pipe
        ddp = DistributedDataParallel(around)
        if how == "call":
            F.mse_loss(ddp(x), y).backward()
        elif how == "alone":
            with ddp.no_sync():
                pipe.step(x, target=y)
        else:
            for _ in range(2):
                pipe.zero_grad()
                pipe.step(x, target=y)
    told = [str(w.message) for w in seen if issubclass(w.category, FxsplitWarning)]
    return [p.grad for p in model.parameters() if p.grad is not None], told


def compute_gradients(of: list[int]) -> list[Tensor]:
    """Return the gradients of the unsplit model, averaged over the batches of some ranks."""
    model = make_model()
    for rank in of:
        x, y = make_batch(rank)
        (F.mse_loss(model(x), y) / len(of)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def run_all(rank: int, n: int) -> dict[str, tuple[list[Tensor], list[str]]]:
    return {how: train(rank, n, how) for how in ("call", "step", "inside", "alone")}


def test_a_step_past_the_wrapper_is_warned_of() -> None:
    for rank, found in enumerate(ranks(2, run_all)):
        for how, (gradients, told) in found.items():
            expected = compute_gradients([0, 1] if how == "call" else [rank])
            torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)
            lone = [text for text in told if "does not sum gradients over its 2 ranks" in text]
            assert len(lone) == (how in ("step", "inside")), (how, told)
            assert all("ddp(x)" in text and 'mesh["dp", "pp"]' in text for text in lone)


def test_without_ranks_there_is_nothing_to_warn_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_lone_step(make_model())
