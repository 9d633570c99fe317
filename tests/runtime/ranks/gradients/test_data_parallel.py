"""Pipelines side by side train as one model on all their rows, however unevenly these are shared."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitError, InputError, RanksDiffer
from fxsplit.torch_internals.distributed.remote_tensors import is_remote
from tests.proof.test_replicas import chain
from tests.support.models import FAST, Mlp, Tied
from tests.support.ranks import ranks

SHARES = [7, 5]


def make_batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(7)
    return torch.randn(12, 8, generator=made).double(), torch.randn(12, 3, generator=made).double()


def sum_of_squares(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().sum()


sum_of_squares.reduction = "sum"  # type: ignore[attr-defined]


def train(rank: int, n: int, kind: str, call: str) -> float:
    # Ranks need not be in order.
    places = [[3, 1], [0, 2]] if kind == "moved" else [[0, 1], [2, 3]]
    mesh = DeviceMesh("cpu", places, mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model: nn.Module = (Tied() if kind == "tied" else Mlp(6)).double()
    loss_fn: Any = sum_of_squares if kind == "sum" else F.mse_loss
    unsplit = copy.deepcopy(model)
    x, y = make_batch()
    # get_local_rank() numbers ranks in rising order, whatever their places are.
    row = mesh.get_coordinate()[0]  # type: ignore[index]
    begin = sum(SHARES[:row])
    mine, target = x[begin : begin + SHARES[row]], y[begin : begin + SHARES[row]]
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 3, "loss_fn": loss_fn, "bucket_bytes": 500}
    # Compile for one shape on all ranks, since the first rank measures for all.
    pipe = fxsplit.compile(model, mesh["dp", "pp"], example_inputs=x[:6], **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (pipe, unsplit)]
    worst = 0.0
    data_parallel = pipe.compiler.compile_group.reduction.data_parallel  # type: ignore[union-attr]
    assert [int(t) for t in data_parallel.gather(torch.tensor(row), "a test")] == [0, 1] and data_parallel.row == row
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = loss_fn(unsplit(x), y)
        expected.backward()
        if call == "step":
            worst = max(worst, float((pipe.step(mine, target=target) - expected).abs()))
        else:
            loss_fn(pipe(mine), target).backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (pipe, unsplit)]
        worst = max(worst, float((norms[0] - norms[1]).abs()))
        for own, other in zip(model.parameters(), unsplit.parameters(), strict=True):
            if not is_remote(own):
                assert own.grad is not None and other.grad is not None
                worst = max(worst, float((own.grad - other.grad).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
    return worst


def evaluate_behind_one_stage(rank: int, n: int) -> float:
    """Return the distance of evaluation from the unsplit model if one rank of each pipeline has all weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), nn.Dropout(0.1)).double()
    unsplit, x = copy.deepcopy(model), make_batch()[0]
    options: dict[str, Any] = {"n_microbatches": 2, "loss_fn": F.mse_loss, "example_inputs": x, "passes": chain((2,))}
    with fxsplit.compile(model, mesh, **options) as pipe:
        return float((pipe.eval()(x) - unsplit.eval()(x)).detach().abs().max())


def test_a_mesh_evaluates_where_one_rank_has_all_weights() -> None:
    """Once ranks compared the weights that they held, and by then the other rank held none."""
    assert max(ranks(4, evaluate_behind_one_stage)) < 1e-12


KINDS = [("mean", "step"), ("sum", "step"), ("tied", "step"), ("moved", "step"), ("mean", "forward")]


@pytest.mark.parametrize(("kind", "call"), KINDS)
def test_uneven_shares_train_as_the_whole_batch(kind: str, call: str) -> None:
    assert max(ranks(4, train, kind, call)) < 1e-12


def differ(rank: int, n: int, how: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(rank // 2 if how == "weights" else 0)
    x, y = make_batch()
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 3, "loss_fn": F.mse_loss, "example_inputs": x}
    try:
        if how == "row":
            dist.barrier()  # without it, a rank that is ahead could end before the others have their groups
            fxsplit.compile(Mlp().double(), mesh["pp"], **options)
        pipe = fxsplit.compile(Mlp().double(), mesh, **options)
        if how == "frozen" and rank >= 2:
            next(pipe.parameters()).requires_grad_(False)
        if how == "call" and rank >= 2:
            pipe(x).sum().backward()
        elif how == "error" and rank >= 2:
            pipe.step(x[:, :4], target=y)
        elif how == "rows":
            pipe.eval()(x[: 12 - rank // 2])
        else:
            pipe.step(x, target=y)
    except FxsplitError as error:
        # A rank that hears of another rank's error before it has found its own raises a RankError of the same kind.
        kind = next(kind for kind in (RanksDiffer, InputError, FxsplitError) if isinstance(error, kind))
        return f"{kind.__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("weights", RanksDiffer.__name__, "of checksum"),
        ("row", InputError.__name__, "the mesh has 2 of 4 ranks"),
        ("call", RanksDiffer.__name__, "makes another call than pipeline 0"),
        ("frozen", RanksDiffer.__name__, "and train the same parameters"),
        ("rows", RanksDiffer.__name__, "pipe.eval().compile_for(x) with one shape"),
    ],
)
def test_what_differs_between_pipelines_is_named(how: str, kind: str, message: str) -> None:
    for raised in ranks(4, differ, how):
        assert raised.startswith(kind) and message in raised, raised


def act_alone(rank: int, n: int, how: str, folder: str) -> str:
    """Let only the first pipeline do something that needs all, while the other steps. Returns the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    x, y = make_batch()
    torch.manual_seed(0)
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 3, "loss_fn": F.mse_loss, "example_inputs": x}
    pipe = fxsplit.compile(nn.Sequential(Mlp(), nn.Dropout(0.1)).double(), mesh, **options)
    raised = ""
    try:
        if how == "group" and rank < 2:
            # Groups that only some ranks name are counted only by these ranks.
            dist.new_group([3])
            pipe.step(x, target=y[:, :2])
        elif how == "save" and rank < 2:
            fxsplit.save_checkpoint(folder, pipe, step=1)
        elif how == "compile" and rank < 2:
            pipe.eval()
            pipe(x)
        elif how == "another" and rank < 2:
            fxsplit.compile(Mlp().double(), mesh, **options)
        pipe.step(x, target=y)
    except (FxsplitError, RuntimeError, ValueError) as error:
        raised = str(error)
    # All go on afterwards.
    pipe.train()
    pipe.step(x, target=y)
    return raised


@pytest.mark.parametrize("how", ["save", "compile", "another", "group"])
def test_what_one_pipeline_does_alone_is_named_and_all_go_on(how: str, tmp_path: Path) -> None:
    """A first call in evaluation ended the processes, and groups that only some ranks made kept all waiting."""
    for raised in ranks(4, act_alone, how, str(tmp_path)):
        assert raised and (how == "group" or "makes another call than pipeline 0" in raised), raised


def test_an_error_in_one_pipeline_is_raised_in_all() -> None:
    found = ranks(4, differ, "error")
    assert all("4x4 and 8x16" in raised for raised in found), found
