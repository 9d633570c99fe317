"""An error of one rank is raised on all of them, at once, and the next step works."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import RankError, StageError, StepTimeout
from fxsplit.torch_internals.distributed.process_groups import clone_store
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.support.models import FAST
from tests.support.ranks import ranks

X, Y = torch.randn(8, 8), torch.randn(8, 3)
TROUBLE: dict[str, Any] = {"where": None}
AWAKE = "another rank has its error"
"""The key in the store of the ranks that ends a sleep."""


class Trouble(torch.autograd.Function):
    """The identity, which fails on request."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        make_trouble("forward", number)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        make_trouble("backward", ctx.number)
        return gradients[0], None


def make_trouble(where: str, number: int) -> None:
    if TROUBLE["where"] == (where, number):
        if TROUBLE["how"] == "sleep":
            clone_store().wait([AWAKE])
        else:
            raise ValueError("trouble")


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return pass_on(torch.tanh(self.linear(x)), self.number)


@torch.fx.wrap
def pass_on(x: Tensor, number: int) -> Tensor:
    return Trouble.apply(x, number)  # type: ignore[no-any-return, no-untyped-call]


def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
    make_trouble("loss", -1)
    return F.mse_loss(outputs[:, :3], target)


def is_same(then: Tensor | None, now: Tensor | None) -> bool:
    if then is None or now is None or is_remote(now):
        return (then is None) == (now is None)
    return torch.equal(then, now)


def fail_once(rank: int, n: int, where: tuple[str, int], how: str, schedule: str) -> tuple[str, str, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(i) for i in range(3)))
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "loss_fn": loss_fn, "schedule": schedule}
    pipe = fxsplit.compile(model, "world", example_inputs=X, **options)
    TROUBLE.update(where=None)
    before = float(pipe.step(X, target=Y))
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    TROUBLE.update(where=where, how=how)
    kind = text = ""
    try:
        pipe.step(X, target=Y, timeout_s=2.0 if how == "sleep" else None)
    except (ValueError, StepTimeout) as error:
        kind, text = type(error).__name__, str(error)
        if how == "sleep" and rank == 1:
            clone_store().set(AWAKE, "")
    kept = all(is_same(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))
    TROUBLE.update(where=None)
    pipe.zero_grad()
    after = float(pipe.step(X, target=Y))
    assert after == before and isinstance(pipe(X), Tensor)
    return kind, text, kept


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("where", [("forward", 0), ("forward", 1), ("backward", 2), ("backward", 0), ("loss", -1)])
def test_an_error_of_one_rank_is_raised_on_all(where: tuple[str, int], schedule: str) -> None:
    found = ranks(3, fail_once, where, "raise", schedule)
    culprit = where[1] % 3  # each rank has a layer, and the last one the loss
    for rank, (kind, text, kept) in enumerate(found):
        assert kept
        assert "trouble" in text and "stage" in text
        assert kind == (StageError if rank == culprit else RankError).__name__, text
        assert rank == culprit or f"rank {culprit} of 3 has raised ValueError" in text


def test_a_step_that_takes_too_long_ends_on_all_ranks() -> None:
    for kind, text, kept in ranks(2, fail_once, ("forward", 0), "sleep", "1F1B"):
        assert kept and kind == RankError.__name__
        assert "has raised StepTimeout: the step takes longer than 2 s" in text
        assert "waits for rank 0, which is to send 1F0" in text
        assert re.search(r"rank 0: .*forward of microbatch 0.*node", text)


def fail_in_hook(rank: int, n: int, kind: str, call: str) -> tuple[str, str, bool]:
    """Let a parameter's hook fail on one rank. Returns its error, and whether gradients are unchanged."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(i) for i in range(3)))
    pipe = fxsplit.compile(model, "world", example_inputs=X, passes=FAST, n_microbatches=4, loss_fn=loss_fn)
    TROUBLE.update(where=("hook", rank) if rank == n - 1 else None, how="raise")
    own = [p for p in pipe.local_parameters() if p.ndim == 2]
    for p in own:
        if kind == "before":
            p.register_hook(lambda gradient: make_trouble("hook", rank))
        else:
            p.register_post_accumulate_grad_hook(lambda p: make_trouble("hook", rank))
    raised: BaseException | None = None
    try:
        if call == "step":
            pipe.step(X, target=Y)
        else:
            F.mse_loss(pipe(X)[:, :3], Y).backward()
    except (ValueError, RuntimeError) as error:
        raised = error
    kept = all(p.grad is None for p in pipe.parameters())
    TROUBLE.update(where=None)
    pipe.zero_grad()
    pipe.step(X, target=Y)
    assert own and all(p.grad is not None for p in pipe.parameters())
    return type(raised).__name__, str(raised), kept


@pytest.mark.parametrize(("kind", "call"), [("before", "step"), ("behind", "step"), ("before", "backward")])
def test_a_gradient_hook_that_fails_on_one_rank_fails_on_all(kind: str, call: str) -> None:
    """Once the other ranks had added to `.grad`, or waited until the rank's next call, which failed as well."""
    found = ranks(2, fail_in_hook, kind, call)
    assert found[1][:2] == ("ValueError", "trouble")
    assert found[0][0] == RankError.__name__
    said = "rank 1 of 2 has raised ValueError" if call == "step" else "failed while gradients were added to .grad"
    assert said in found[0][1]
    assert call != "step" or all(kept for _, _, kept in found)


def fail_again_and_again(rank: int, n: int, folder: str) -> tuple[int, int]:
    """Return how many files are open after two failures, and after six."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(i) for i in range(3)))
    pipe = fxsplit.compile(model, "world", example_inputs=X, passes=FAST, n_microbatches=4, loss_fn=loss_fn)
    counts = []
    for number in range(6):
        TROUBLE.update(where=("loss", -1), how="raise")
        with pytest.raises(ValueError, match="trouble"):
            pipe.step(X, target=Y)
        TROUBLE.update(where=None)
        pipe.step(X, target=Y)
        # Threads of all ranks save in a group of their own.
        fxsplit.save_checkpoint(folder, pipe, step=number).wait()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[1], counts[-1]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted on Linux alone")
def test_groups_of_a_failure_are_closed(tmp_path: Path) -> None:
    """Each failure left ten open files, and a program that skips bad batches came to have no more of them."""
    for early, late in ranks(2, fail_again_and_again, str(tmp_path)):
        assert late <= early + 4
