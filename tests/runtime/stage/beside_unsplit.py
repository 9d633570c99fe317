"""Compare a step of a small model as a pipeline with the same step unsplit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.schedule.generators.catalogue import ScheduleName
from tests.support.models import FAST

Loss = Callable[[nn.Module], Callable[[Any, Any], Tensor]]


def mean_square(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    return F.mse_loss


def largest_difference(
    model: nn.Module, schedule: ScheduleName, recompute: str = "never", loss: Loss = mean_square, **options: Any
) -> float:
    """Return by how much a step as a pipeline on two devices differs from the unsplit model's, in float64."""
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    ours, theirs = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    given: dict[str, Any] = {"passes": FAST, "n_microbatches": 4, "recompute": recompute, **options}
    with fxsplit.compile(ours, ["cpu"] * 2, loss_fn=loss(ours), schedule=schedule, **given) as pipe:
        return compare(run_pipeline_step(pipe, [x], x), run_unsplit_step(theirs, [x], x, loss(theirs), 4)).largest
