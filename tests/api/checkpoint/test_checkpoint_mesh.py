"""Checkpoints of a mesh of pipelines: weights, optimizer, and the residuals of gradient hooks."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import fxsplit
from fxsplit.api.checkpoint import checkpoint
from fxsplit.errors import FileError, FxsplitWarning, RankError, RanksDiffer
from fxsplit.formats.weights.safetensors_reader import TensorFile
from fxsplit.runtime.ranks.hooks.error_feedback import ErrorFeedback
from fxsplit.runtime.ranks.hooks.power_errors import PowerErrors
from tests.api.checkpoint.test_checkpoint_ranks import hash_state, merge
from tests.support.checkpoints import read
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(12, 8, generator=made).double(), torch.randn(12, 3, generator=made).double()


class Run:
    """A pipeline of a mesh with this number of rows, its model and optimizer."""

    def __init__(self, n: int, rows: int, seed: int, hook: Any = "topk{share=0.2}") -> None:
        self.mesh = init_device_mesh("cpu", (rows, n // rows), mesh_dim_names=("dp", "pp"))
        torch.manual_seed(seed)
        self.model = Mlp(6).double()
        options: dict[str, Any] = {"passes": FAST, "n_microbatches": 3, "loss_fn": F.mse_loss}
        if rows > 1 and hook is not None:
            options["gradient_hook"] = hook
        self.pipe = fxsplit.compile(self.model, self.mesh, example_inputs=make_batch(0)[0][: 12 // rows], **options)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.01)
        size = 12 // rows
        self.own = slice(self.mesh.get_local_rank("dp") * size, (self.mesh.get_local_rank("dp") + 1) * size)

    def step(self, number: int) -> float:
        x, y = make_batch(number)
        self.optimizer.zero_grad()
        loss = self.pipe.step(x[self.own], target=y[self.own])
        self.optimizer.step()
        return float(loss)

    def hash(self) -> dict[str, str]:
        return hash_state(read(self.model, self.optimizer))

    @property
    def residuals(self) -> ErrorFeedback | PowerErrors:
        found = self.pipe.compiler.compile_group.reduction.data_parallel.reducer.left_out  # type: ignore[union-attr]
        assert found is not None
        return found

    def sum_left(self) -> dict[str, Tensor]:
        """Return the sum over all pipelines of the residuals of the mean of gradients, for this rank's parameters."""
        data_parallel = self.pipe.compiler.compile_group.reduction.data_parallel  # type: ignore[union-attr]
        found = {}
        for name, weight in self.model.named_parameters():
            if self.residuals.has(weight):
                told = data_parallel.gather(self.residuals.get(weight).detach().clone(), "a test")
                found[name] = torch.stack(told).sum(0) / data_parallel.n_pipelines
        return found


TOPK = "topk{share=0.2}"
Found = tuple[dict[str, str], list[float], dict[str, Tensor]]
"""Hashes of this rank's state, losses of later steps, and the residuals of all pipelines."""


def train_and_save(rank: int, n: int, folder: Path, hook: str = TOPK, steps: int = 3) -> Found:
    """Save after some steps, and make three more."""
    run = Run(n, 2, seed=0, hook=hook)
    for number in range(steps):
        run.step(number)
    fxsplit.save_checkpoint(folder, run.pipe, run.optimizer, step=steps)
    state, left = run.hash(), run.sum_left()
    after = [run.step(number) for number in range(steps, steps + 3)]
    run.pipe.close()
    return state, after, left


def load(rank: int, n: int, folder: Path, rows: int, hook: str = TOPK, steps: int = 3) -> Found:
    """Load into a mesh with this number of rows, and make three steps."""
    run = Run(n, rows, seed=5, hook=hook)
    if rows > 1:
        for number in range(7, 7 + steps):
            run.step(number)  # earlier residuals are replaced
        assert fxsplit.load_checkpoint(folder, run.pipe, run.optimizer).step == steps
    else:
        name = hook.partition("{")[0]
        with pytest.warns(FxsplitWarning, match=rf"holds residuals of gradient hooks \({name}"):
            fxsplit.load_checkpoint(folder, run.pipe, run.optimizer)
        fxsplit.load_checkpoint(folder, run.pipe)  # without an optimizer no training goes on
    state, left = run.hash(), run.sum_left() if rows > 1 else {}
    after = [run.step(number) for number in range(steps, steps + 3)]
    run.pipe.close()
    return state, after, left


def merge_left(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def test_a_mesh_saves_and_any_other_loads(tmp_path: Path) -> None:
    found = ranks(4, train_and_save, tmp_path)
    saved, left = merge([state for state, _, _ in found]), merge_left([left for _, _, left in found])
    assert len(left) == 12 and sum(bool(value.any()) for value in left.values()) > 9
    # On the same mesh everything continues bit for bit, including residuals.
    again = ranks(4, load, tmp_path, 2)
    assert merge([state for state, _, _ in again]) == saved
    assert [after for _, after, _ in again] == [after for _, after, _ in found]
    assert all(torch.equal(value, left[name]) for name, value in merge_left([kept for _, _, kept in again]).items())
    # On another number of pipelines the residuals add up to the same values.
    three = ranks(3, load, tmp_path, 3)
    assert merge([state for state, _, _ in three]) == saved
    other = merge_left([kept for _, _, kept in three])
    assert other.keys() == left.keys()
    for name, value in other.items():
        torch.testing.assert_close(value, left[name], rtol=1e-12, atol=1e-15)
    # The same on one pipeline of two ranks, and in the plain model.
    assert merge([state for state, _, _ in ranks(2, load, tmp_path, 1)]) == saved
    model = Mlp(6).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.warns(FxsplitWarning, match="which are not loaded here: gradient_hook=None"):
        assert fxsplit.load_checkpoint(tmp_path, model, optimizer).step == 3
    assert hash_state(read(model, optimizer)) == saved
    files = [TensorFile(path) for path in sorted((tmp_path / "step-3").glob("training*"))]
    names = [name for file in files for name in file.list_names() if name.startswith("residual.")]
    for file in files:
        file.__exit__(None, None, None)
    assert sorted(names) == sorted(f"residual.{row}.{name}" for row in (0, 1) for name, _ in model.named_parameters())


@pytest.mark.long
@pytest.mark.parametrize(("hook", "steps"), [(TOPK, 3), ("sketch{share=0.2}", 3), ("powersgd", 5)])
def test_what_hooks_have_left_out_is_kept_on_other_meshes(hook: str, steps: int, tmp_path: Path) -> None:
    """Saved on 2 pipelines of 2 stages; resumed on as many, on more, and on one, with other numbers of stages."""
    found = ranks(4, train_and_save, tmp_path, hook, steps)
    saved, left = merge([state for state, _, _ in found]), merge_left([left for _, _, left in found])
    assert sum(bool(value.any()) for value in left.values()) > 3
    for n, rows in [(4, 2), (2, 2), (3, 3), (4, 4), (3, 1)]:
        again = ranks(n, load, tmp_path, rows, hook, steps)
        assert merge([state for state, _, _ in again]) == saved, (n, rows)
        if rows == 1:
            continue
        kept = merge_left([own for _, _, own in again])
        assert kept.keys() == left.keys()
        for name, value in kept.items():
            torch.testing.assert_close(value, left[name], rtol=1e-12, atol=1e-15)
    if hook != "powersgd":  # which finds its matrices again
        assert [after for _, after, _ in ranks(4, load, tmp_path, 2, hook, steps)] == [after for _, after, _ in found]


def go_on_with_power(rank: int, n: int, folder: Path) -> tuple[float, float, float]:
    """Save the residuals of PowerSGD, load them on another mesh, and add gradients until the hook compresses again.

    Returns the size of the residuals, the part of them that another run has, and the error of applied and kept
    gradients together.
    """
    run = Run(n, 2, 0, "powersgd")
    for number in range(5):
        run.step(number)
    fxsplit.save_checkpoint(folder, run.pipe, run.optimizer, step=5).wait()
    dist.barrier()
    left, other = run.sum_left(), Run(n, 2, 5, "powersgd")
    for number in range(3):
        other.step(number)  # earlier residuals are replaced
    fxsplit.load_checkpoint(folder, other.pipe, other.optimizer)
    same = max(float((value - left[name]).abs().max()) for name, value in other.sum_left().items())
    unsplit = Mlp(6).double()
    unsplit.load_state_dict(other.pipe.state_dict())
    other.pipe.zero_grad()
    for number in range(5, 9):
        x, y = make_batch(number)
        F.mse_loss(unsplit(x), y).backward()
        other.pipe.step(x[other.own], target=y[other.own])
    exact, after = {name: p.grad for name, p in unsplit.named_parameters()}, other.sum_left()
    lost = 0.0
    for name, weight in other.model.named_parameters():
        own, whole = weight.grad, exact[name]
        if name in left:
            assert own is not None and whole is not None
            lost = max(lost, float((own + after[name] - whole - left[name]).abs().max()))
    run.pipe.close()
    other.pipe.close()
    return max(float(value.abs().max()) for value in left.values()), same, lost


def test_what_powersgd_has_left_out_is_not_lost(tmp_path: Path) -> None:
    for most, same, lost in ranks(4, go_on_with_power, tmp_path):
        assert most > 1e-3 and same == 0.0 and lost < 1e-12


class Own:
    """The state of a user's own hook, which fxsplit cannot save."""

    def __init__(self) -> None:
        self.group = None


def add_own(state: Own, bucket: Any) -> Any:
    return default_hooks.allreduce_hook(state.group, bucket)  # type: ignore[arg-type]


def start_afresh(rank: int, n: int, folder: Path) -> str:
    run = Run(n, 2, 0, (Own(), add_own))
    for number in range(4):
        run.step(number)
    fxsplit.save_checkpoint(folder, run.pipe, run.optimizer, step=4).wait()
    dist.barrier()
    with pytest.warns(FxsplitWarning) as caught:
        fxsplit.load_checkpoint(folder, run.pipe, run.optimizer)
    run.step(4)
    run.pipe.close()
    return str(caught[0].message)


def test_what_is_not_kept_is_said_to_start_afresh(tmp_path: Path) -> None:
    for text in ranks(4, start_afresh, tmp_path):
        assert text == "gradient_hook='add_own' starts afresh: checkpoints do not hold its state from step to step"


def differ(rank: int, n: int, folder: Path) -> str:
    """Load on one rank, or in one pipeline, a checkpoint with a different manifest of the same size."""
    run = Run(n, 2, 0)
    fxsplit.save_checkpoint(folder, run.pipe, run.optimizer, step=1, extra={"epoch": 1}).wait()
    dist.barrier()
    before = copy.deepcopy(run.hash())
    original = checkpoint.read_manifest  # type: ignore[attr-defined]

    def read_other(path: Path) -> Any:
        found = original(path)
        found.extra["epoch"] = 1 + rank // 2
        return found

    checkpoint.read_manifest = read_other  # type: ignore[attr-defined, assignment]
    with pytest.raises(RanksDiffer) as caught:
        fxsplit.load_checkpoint(folder, run.pipe, run.optimizer)
    checkpoint.read_manifest = original  # type: ignore[attr-defined]
    assert run.hash() == before
    fxsplit.load_checkpoint(folder, run.pipe, run.optimizer)
    run.pipe.close()
    return str(caught.value)


def test_ranks_that_read_other_manifests_are_named(tmp_path: Path) -> None:
    for text in ranks(4, differ, tmp_path):
        assert "rank 2 runs loads step-1 with a manifest of hash" in text


def save_slowly(rank: int, n: int, folder: Path) -> list[Any]:
    """Save with a first pipeline that writes late, and again with one that cannot write."""
    run = Run(n, 2, 0, hook=None)
    run.step(0)
    write = checkpoint._write

    def write_late(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    def fail(*args: Any) -> None:
        raise FileError("the disk is full")

    found: list[Any] = []
    for step, function in enumerate((write_late, fail, write_late)):
        vars(checkpoint)["_write"] = function
        try:
            path = fxsplit.save_checkpoint(folder, run.pipe, run.optimizer, step=step).wait()
            found.append(fxsplit.load_checkpoint(path, run.pipe, run.optimizer).step)
        except (FileError, RankError) as error:
            found.append(str(error))
    return found


def test_all_pipelines_wait_for_the_one_that_writes(tmp_path: Path) -> None:
    """The other pipelines must not return the path of a checkpoint before it is there, and must learn of a failure."""
    for rank, (first, failed, last) in enumerate(ranks(4, save_slowly, tmp_path)):
        assert (first, last) == (0, 2)
        assert "the disk is full" in failed and (rank < 2 or f"rank {rank - 2}, which writes the checkpoint" in failed)
