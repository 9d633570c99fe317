"""ZeroRedundancyOptimizer over the pipelines of a mesh is the plain optimizer, and each rank keeps a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import ElsewhereError, InputError
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.runtime.ranks.hooks.test_gradient_hooks import compile_row, get_own, make_batch, make_mesh
from tests.support.ranks import ranks

Trained = tuple[float, int, int]


def train_both(rank: int, n: int, folder: Path) -> list[Trained]:
    return [train(n, which, folder) for which in ("local", "all")]


def train(n: int, which: str, folder: Path) -> Trained:
    """Return the largest distance of a weight from plain AdamW's, and how many states and weights this rank has."""
    # The import warns of torch.jit.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    mesh = make_mesh(n)
    own = get_own(mesh)
    pipe, unsplit = compile_row(mesh)
    given = list(pipe.local_parameters() if which == "local" else pipe.parameters())
    optimizer: Any = ZeroRedundancyOptimizer(given, torch.optim.AdamW, process_group=mesh.get_group("dp"), lr=0.01)
    plain = torch.optim.AdamW(unsplit.parameters(), lr=0.01)
    for number in range(4):
        x, y = make_batch(number)
        for one in (optimizer, plain):
            one.zero_grad()
        pipe.step(x[own], target=y[own])
        F.mse_loss(unsplit(x), y).backward()
        for model in (pipe, unsplit):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for one in (optimizer, plain):
            one.step()
    with pytest.raises(InputError, match="ZeroRedundancyOptimizer keeps the state of a parameter on only one of"):
        fxsplit.save_checkpoint(folder, pipe, optimizer, step=4)
    pairs = zip(pipe.parameters(), unsplit.parameters(), strict=True)
    worst = max(float((a - b).detach().abs().max()) for a, b in pairs if not is_remote(a))
    kept = sum(bool(held) for held in optimizer.optim.state.values())
    return worst, kept, sum(1 for _ in pipe.local_parameters())


def test_zero_is_the_plain_optimizer(tmp_path: Path) -> None:
    for which, found in zip(("local", "all"), zip(*ranks(4, train_both, tmp_path), strict=True), strict=True):
        assert max(worst for worst, _, _ in found) < 1e-12
        # Ranks 0 and 2 have the same stages, and so do ranks 1 and 3.
        for one, other in ((0, 2), (1, 3)):
            assert found[one][1] + found[other][1] == found[one][2], "each parameter's state is on one rank"
            assert which == "all" or min(found[one][1], found[other][1]) > 0


def refuse(rank: int, n: int) -> str:
    """Broadcast weights among all ranks, although each weight is on some ranks only."""
    pipe, _ = compile_row(make_mesh(n))
    # The mesh's group for these stages works; the group of all ranks does not.
    with pytest.raises(ElsewhereError) as caught:
        for weight in pipe.parameters():
            if is_remote(weight):
                dist.broadcast(weight.detach(), 0)
    with pytest.raises(ElsewhereError, match=r"all(_)?reduce.*\(\) among ranks"):
        dist.all_reduce(next(w for w in pipe.parameters() if is_remote(w)).detach())
    dist.barrier()
    return str(caught.value)


def test_values_that_some_ranks_have_are_not_taken_for_those_of_others() -> None:
    for text in ranks(4, refuse):
        assert "broadcast() among ranks [0, 1, 2, 3] needs its values on this rank: pipe.local_parameters() are" in text
