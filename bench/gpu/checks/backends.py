"""Checks of torch.compile's backends for stages."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional as F

from bench.gpu.setting import MICROBATCHES, Net, Setting
from fxsplit.api.compare import compare, run_pipeline_step, run_unsplit_step


def inductor(setting: Setting) -> tuple[bool, str]:
    """Compare a step whose stages inductor compiled with the unsplit model's, in single precision."""
    if setting.dry:
        return True, "needs a GPU"
    x, y = setting.make_batch(torch.float32)
    model = Net().to(setting.device)
    # Compiled kernels sum in another order, in single precision.
    expected = run_unsplit_step(copy.deepcopy(model), [x], y, F.cross_entropy, MICROBATCHES)
    with setting.compile(model, 2, example_inputs=x, stage_backend="inductor") as pipe:
        difference = compare(run_pipeline_step(pipe, [x], y), expected).gradient
    return difference < 1e-3, f"gradients differ by {difference:.1e}"


def cudagraphs(setting: Setting) -> tuple[bool, str]:
    """Take two steps whose stages replay CUDA graphs, which keep their state by thread."""
    if setting.dry:
        return True, "needs a GPU"
    x, y = setting.make_batch(torch.float32)
    with setting.compile(Net().to(setting.device), 2, example_inputs=x, stage_backend="cudagraphs") as pipe:
        # The first step records graphs, and the second one replays them.
        pipe.step(x, target=y)
        pipe.step(x, target=y)
    return True, "ran"
