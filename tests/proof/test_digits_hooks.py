"""Digits trained by four ranks, two pipelines of two stages, come to the same accuracy with compressed gradients."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import fxsplit
from tests.support.models import FAST
from tests.support.ranks import ranks

BATCH, TRAINED = 64, 1500
"""The rows of a step, and the number of digits in the training set; the rest are the test set."""


@cache
def load_example() -> dict[str, Any]:
    """Return the names of examples/train_digits.py. It loads scikit-learn, for a second."""
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_digits.py"))


def choose_rows(step: int) -> Tensor:
    """Return the indices of a step's images: each epoch has all images in an order of its own."""
    epoch, number = divmod(step, TRAINED // BATCH)
    order = torch.randperm(TRAINED, generator=torch.Generator().manual_seed(epoch))
    return order[number * BATCH : (number + 1) * BATCH]


def train(rank: int, n: int, hook: str | None, steps: int) -> tuple[float, str]:
    """Return the accuracy after some steps, and the text about the traffic of gradients."""
    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "pp"))
    images, digits = load_example()["read_digits"]()
    # The last digits of the file are from other writers.
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images, digits = images[order].float(), digits[order]
    torch.manual_seed(0)
    model = load_example()["build"]().float()
    row, half = mesh.get_local_rank("dp"), BATCH // 2
    options: dict[str, Any] = {"passes": FAST, "n_microbatches": 2, "loss_fn": cross_entropy, "gradient_hook": hook}
    pipe = fxsplit.compile(model, mesh, example_inputs=images[:half], **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        rows = choose_rows(step)[row * half : (row + 1) * half]
        optimizer.zero_grad()
        pipe.step(images[rows], target=digits[rows])
        optimizer.step()
    pipe.eval()
    with torch.no_grad():
        found = pipe(images[TRAINED:]).argmax(1)
    traffic = str(pipe.gradient_traffic)
    pipe.close()
    return float((found == digits[TRAINED:]).float().mean()), traffic


@pytest.mark.long
def test_digits_train_to_the_same_accuracy() -> None:
    steps = 12 * (TRAINED // BATCH)
    (plain, _), *_ = ranks(4, train, None, steps, limit_s=300)
    assert plain > 0.97
    for hook in ("topk{share=0.02}", "sketch{share=0.02}"):
        # The test set has 297 images, so each is a third of a percent. Another processor rounds otherwise, and after
        # 276 steps that is up to four images more or fewer.
        for accuracy, told in ranks(4, train, hook, steps, limit_s=300):
            assert accuracy > plain - 0.03, (hook, accuracy, plain)
            assert f"in {steps} steps by {hook}" in told
