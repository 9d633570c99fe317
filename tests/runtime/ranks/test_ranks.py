"""Pipelines over ranks, all schedules in one process group: bit for bit the results of threads of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from tests.runtime.ranks.compared import compare
from tests.support.models import FAST, Buffers, LateReader, ManyInputs, Mlp, ModeDependent, Residual
from tests.support.ranks import ranks

SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "V-Half", "DualPipeV"]


def make_batch(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return inputs and targets that are the same on every rank."""
    made = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=made, dtype=dtype), torch.randn(shape[0], 3, generator=made, dtype=dtype)


def run_schedules(rank: int, n: int, names: list[str]) -> dict[str, int]:
    counts = {}
    x, y = make_batch(17, 8)

    def step(pipe: Any, i: int) -> Any:
        # The third batch has fewer rows, and the last one fewer still.
        rows = [16, 16, 15, 9][i]
        losses: list[Tensor] = []
        found = pipe.step(x[:rows], target=y[:rows], return_outputs=i == 1, losses=losses)
        return found, losses

    for name in names:
        torch.manual_seed(0)
        model = nn.Sequential(Mlp(9), nn.Dropout(0.2), nn.Linear(3, 3))
        counts[name] = compare(model, n, step, {"schedule": name, "loss_fn": F.mse_loss, "example_inputs": x}, 4)
    return counts


@pytest.mark.parametrize(
    ("n", "names"),
    [(2, SCHEDULES), (3, ["1F1B", "ZBVZeroBubble"]), pytest.param(3, SCHEDULES, marks=pytest.mark.long)],
)
def test_all_schedules_equal_threads(n: int, names: list[str]) -> None:
    found = ranks(n, run_schedules, names)
    # Every gradient of the ten layers was there on some rank, in each of four steps.
    for name in names:
        assert sum(each[name] for each in found) == 4 * 2 * 10


def run_models(rank: int, n: int) -> list[int]:
    counts = []
    x, y = make_batch(12, 8)

    def step(pipe: Any, i: int) -> Any:
        return pipe.step(x, target=y)

    def loss(outputs: Any, target: Tensor) -> Any:
        outputs = outputs["main"] + outputs["aux"][0] if isinstance(outputs, dict) else outputs
        return (outputs[:, :3] - target).square().mean()

    for kind in (LateReader, ModeDependent, Buffers):
        torch.manual_seed(0)
        counts.append(compare(kind(), n, step, {"loss_fn": loss, "example_inputs": x}))
    images, classes = torch.randn(8, 3, 8, 8), torch.randint(5, (8,))
    torch.manual_seed(0)

    def step_images(pipe: Any, i: int) -> Any:
        size = [8, 8, 7][i]
        return pipe.step(images[:size].contiguous(memory_format=torch.channels_last), target=classes[:size])

    model: Any = Residual()
    model = model.to(memory_format=torch.channels_last)
    options = {"loss_fn": F.cross_entropy, "example_inputs": images}
    counts.append(compare(model, n, step_images, options))
    return counts


def test_unusual_models_equal_threads() -> None:
    assert all(sum(counts) for counts in zip(*ranks(2, run_models), strict=True))


def run_many_inputs(rank: int, n: int) -> int:
    made = torch.Generator().manual_seed(7)

    def step(pipe: Any, i: int) -> Any:
        length = [5, 5, 7][i]  # the numbers that cross stages follow from the lengths
        batch = {
            "ids": torch.randint(10, (8, length), generator=made.manual_seed(i)),
            "extra": torch.ones(8, length, 8),
        }
        mask = torch.rand(8, length, generator=made) > 0.3
        return pipe.step(batch, mask, double=True, target=torch.zeros(8, length, 3))

    def loss(outputs: Any, target: Tensor) -> Tensor:
        return F.mse_loss(outputs["scores"], target)

    batch = {"ids": torch.randint(10, (8, 5)), "extra": torch.ones(8, 5, 8)}
    example = {"batch": batch, "mask": torch.ones(8, 5, dtype=torch.bool), "double": True}
    return compare(ManyInputs(), n, step, {"loss_fn": loss, "example_inputs": example})


def test_numbers_masks_and_dicts_cross_ranks() -> None:
    assert sum(ranks(2, run_many_inputs)) > 0


def run_masks(rank: int, n: int) -> int:
    """Step with a mean under a mask, written by hand; the first step's microbatches count as many rows."""
    x, y = make_batch(16, 8, dtype=torch.float64)

    def step(pipe: Any, i: int) -> Any:
        mask = torch.arange(16) >= [0, 5, 11][i]
        return pipe.step(x, target=(y, mask))

    def loss(outputs: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((outputs - target[0]).square().sum(1) * target[1]).sum() / target[1].sum()

    torch.manual_seed(0)
    return compare(Mlp().double(), n, step, {"loss_fn": loss, "example_inputs": x})


@pytest.mark.parametrize("n", [2, 3])
def test_a_mean_by_hand_equals_threads(n: int) -> None:
    assert sum(ranks(n, run_masks)) > 0


def begin_apart(rank: int, n: int) -> list[list[str]]:
    """Return the warnings for a model from one seed, and for one from a seed of each rank."""
    said = []
    for seed in (0, rank):
        torch.manual_seed(seed)
        with warnings.catch_warnings(record=True) as seen, fxsplit.compile(Mlp(), "world", passes=FAST) as pipe:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe.train(not pipe.training)
                pipe.compile_for(torch.ones(4, 8))
        said.append([str(w.message) for w in seen if "begins with other weights" in str(w.message)])
    return said


def test_ranks_that_begin_with_other_weights_are_named() -> None:
    """The warning comes once. For the second compile, each rank has only the weights of its own stages."""
    for alike, apart in ranks(2, begin_apart):
        assert not alike and len(apart) == 1
        assert apart[0].startswith("rank 1 begins with other weights than rank 0, such as 'layers.0.weight', and each")
        assert "build the model from one seed on all ranks" in apart[0]
