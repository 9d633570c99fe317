"""Checks that a pipeline on the GPU computes the same as the unsplit model."""

from __future__ import annotations

import copy
import itertools

import torch
from torch.nn import functional as F

from bench.gpu.setting import MICROBATCHES, Net, Setting, flatten_gradients, largest_difference
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step

CLOSE = 1e-9
"""The relative difference in float64 that a different order of summation explains."""


def schedules_equal_the_unsplit_model(setting: Setting) -> tuple[bool, str]:
    """Compare one step under each schedule with the unsplit model's."""
    x, y = setting.make_batch()
    found = {}
    for n_devices, schedule in itertools.product((2,) if setting.dry else (2, 4), setting.schedules):
        model = Net().double().to(setting.device)
        # A copy, because both would add to the same gradients.
        expected = run_unsplit_step(copy.deepcopy(model), [x], y, F.cross_entropy, MICROBATCHES)
        with setting.compile(model, n_devices, schedule=schedule, example_inputs=x) as pipe:
            found[schedule, n_devices] = compare(run_pipeline_step(pipe, [x], y), expected).largest
    worst = max(found.values())
    return worst < CLOSE, f"largest difference {worst:.1e} of {len(found)} schedules"


def call_and_backward(setting: Setting) -> tuple[bool, str]:
    """Train by pipe(x) and loss.backward(), without `step`.

    autograd has one thread for each GPU, and runs the pipeline's own backward in it. A worker whose backward waits for
    that thread waits forever.
    """
    x, y = setting.make_batch()
    model = Net().double().to(setting.device)
    twin = copy.deepcopy(model)
    # Three stages, so that one of them has neighbours on both sides.
    with setting.compile(model, 3, example_inputs=x) as pipe:
        F.cross_entropy(pipe(x), y).backward()
    run_unsplit_step(twin, [x], y, F.cross_entropy, MICROBATCHES)
    difference = largest_difference([flatten_gradients(twin), flatten_gradients(model)])
    return difference < CLOSE, f"gradients differ by {difference:.1e}"


def autocast_holds_in_workers(setting: Setting) -> tuple[bool, str]:
    """Take a step inside autocast: outputs are in half precision, gradients are not."""
    x, y = setting.make_batch(torch.float32)
    model = Net().to(setting.device)
    with setting.compile(model, 2, example_inputs=x) as pipe, torch.autocast(setting.device.type, torch.bfloat16):
        _, out = pipe.step(x, target=y, return_outputs=True)
    # Weights are in single precision, and so are their gradients, even inside autocast.
    gradients = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    holds = out.dtype == torch.bfloat16 and gradients == {torch.float32}
    return holds, f"outputs {out.dtype}, gradients {gradients}"
