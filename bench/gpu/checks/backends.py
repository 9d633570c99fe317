"""Checks of torch.compile's backends for stages."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional as F

from bench.gpu.checks.equality import CLOSE
from bench.gpu.setting import MICROBATCHES, Net, Setting
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step
from fxsplit.errors import InputError


def inductor(setting: Setting) -> tuple[bool, str]:
    """Compare a step through stages that inductor has compiled with the unsplit model's."""
    if setting.dry:
        return True, "needs a GPU"
    # In single precision other sums round differently, and batch norm makes that a hundredth of a gradient.
    x, y = setting.make_batch()
    model = Net().to(setting.device).double()
    expected = run_unsplit_step(copy.deepcopy(model), [x], y, F.cross_entropy, MICROBATCHES)
    with setting.compile(model, 2, example_inputs=x, stage_backend="inductor") as pipe:
        difference = compare(run_pipeline_step(pipe, [x], y), expected).gradient
    return difference < CLOSE, f"gradients differ by {difference:.1e}"


def cudagraphs(setting: Setting) -> tuple[bool, str]:
    """Ask for stages that replay CUDA graphs, which torch keeps for one thread: they are refused by name."""
    x, _ = setting.make_batch(torch.float32)
    try:
        setting.compile(Net().to(setting.device), 2, example_inputs=x, stage_backend="cudagraphs").close()
    except InputError as error:
        return "cudagraphs" in str(error), f"refused: {str(error)[:120]}"
    return False, "was compiled"
