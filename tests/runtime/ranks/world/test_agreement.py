"""A difference between ranks is named on every rank before anything is sent, and nothing has changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitError, InputError, RankError, RanksDiffer
from fxsplit.runtime.ranks.world.agreement import describe_shapes, sum_values
from fxsplit.schedule.generators.catalogue import ScheduleName
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks

X, Y = torch.randn(8, 8), torch.randn(8, 3)


def make(rank: int, **options: Any) -> fxsplit.Pipeline:
    torch.manual_seed(0)
    options = {"passes": FAST, "n_microbatches": 4, "loss_fn": F.mse_loss, "example_inputs": X, **options}
    return fxsplit.compile(Mlp(), "world", **options)


def other_batch(rank: int, pipe: fxsplit.Pipeline) -> None:
    pipe.step(X, target=Y + (rank == 1))


def other_rows(rank: int, pipe: fxsplit.Pipeline) -> None:
    rows = 8 - (rank == 1)
    pipe.step(X[:rows], target=Y[:rows])


def other_inputs(rank: int, pipe: fxsplit.Pipeline) -> None:
    pipe.step(X * (1 + (rank == 1)), target=Y)


def other_call(rank: int, pipe: fxsplit.Pipeline) -> None:
    if rank == 1:
        pipe(X)
    pipe.step(X, target=Y)


def skipped(rank: int, pipe: fxsplit.Pipeline) -> None:
    if rank == 0:
        pipe.step(X, target=Y)
        pipe.step(X, target=Y)
    else:
        pipe.step(X, target=Y)
        pipe(X)


def other_mode(rank: int, pipe: fxsplit.Pipeline) -> None:
    if rank == 1:
        with torch.no_grad():
            pipe(X)
    else:
        pipe(X)


def differ(rank: int, n: int, what: Any) -> tuple[str, bool, float]:
    pipe = make(rank)
    before = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    raised = ""
    try:
        what(rank, pipe)
    except FxsplitError as error:
        assert isinstance(error, RanksDiffer) and isinstance(error, InputError)
        raised = str(error)
    changed = what is not skipped and any(p.grad is not b for p, b in zip(pipe.parameters(), before, strict=True))
    pipe.zero_grad()
    # All ranks make the next call alike, and it works.
    return raised, changed, float(pipe.step(X, target=Y))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (other_batch, "rank 1 has another target: its first and last values"),
        (other_rows, "rank 1 has inputs of other shapes: float32[7, 8]"),
        (other_inputs, "rank 1 has another batch"),
        (other_call, "rank 1 calls forward number 0 of pipeline 0; rank 0 calls step number 0 of pipeline 0"),
        (skipped, "rank 1 calls forward number 1 of pipeline 0; rank 0 calls step number 1 of pipeline 0"),
        (other_mode, "rank 1 runs it in other modes"),
    ],
)
def test_what_differs_is_named_on_every_rank(what: Any, message: str) -> None:
    for raised, changed, loss in ranks(2, differ, what):
        assert message in raised and not changed and loss > 0


def compile_otherwise(rank: int, n: int, what: str) -> str:
    torch.manual_seed(0)
    if what == "weights":
        model: nn.Module = Mlp(width=16 + (rank == 1))
    elif what == "code":
        model = nn.Sequential(Mlp(), nn.ReLU() if rank == 0 else nn.Tanh())
    else:
        model = Mlp()
    schedule: ScheduleName = "GPipe" if what == "options" and rank == 1 else "1F1B"
    try:
        fxsplit.compile(model, "world", example_inputs=X, passes=FAST, n_microbatches=4, schedule=schedule)
    except RanksDiffer as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "rank 1 runs fxsplit .* with weights"),
        ("options", "rank 1 runs fxsplit .*GPipe.*; rank 0 runs .*1F1B"),
        ("code", "rank 1 has captured the graph .* of 10 nodes; rank 0 has captured the graph"),
    ],
)
def test_other_models_and_options_are_named_by_compile(what: str, message: str) -> None:
    for raised in ranks(2, compile_otherwise, what):
        assert re.search(message, raised), raised


def plan_alone(rank: int, n: int) -> list[str]:
    """Costs that differ from rank to rank, as measured times do, would lead to other plans."""
    pipe = make(rank)
    costs = pipe.costs
    return [str(pipe.plan), costs.to_text()]


def test_the_first_rank_plans_for_all() -> None:
    first, *others = ranks(3, plan_alone)
    assert all(other == first for other in others) and "rank2" in first[0]


class Fails(nn.Module):
    """Fails in a rank of its own choice."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 0:
            raise ValueError("no graph of this here")
        return x


def fail_to_compile(rank: int, n: int) -> str:
    model = nn.Sequential(nn.Linear(8, 8), Fails(), nn.Linear(8, 3))
    try:
        fxsplit.compile(model, "world", example_inputs=X, passes=FAST)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_compile_that_fails_on_one_rank_fails_on_all() -> None:
    found = ranks(2, fail_to_compile)
    assert "no graph of this here" in found[0]
    assert found[1].startswith(f"{RankError.__name__}: rank 0 of 2 has raised ") and "no graph of this" in found[1]


def test_checksums_see_the_ends_of_all_tensors_in_a_batch() -> None:
    long = torch.zeros(10_000)
    before = sum_values({"a": (long, torch.ones(2)), "b": None})
    for place in (0, -1):
        changed = long.clone()
        changed[place] = 1.0
        assert sum_values({"a": (changed, torch.ones(2)), "b": None}) != before
    wide = torch.arange(12.0).reshape(3, 4).t()
    assert sum_values(wide) != sum_values(wide + 1) and sum_values(torch.tensor(3)) != sum_values(torch.tensor(4))
    assert sum_values(torch.zeros(2, dtype=torch.bfloat16)) != sum_values(torch.ones(2, dtype=torch.bfloat16))
    assert describe_shapes([torch.zeros(2, 3), 5]) == "float32[2, 3], 5"
