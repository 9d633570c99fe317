"""Checks of streams: which work waits for which, and which does not wait."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.gpu.checks.equality import CLOSE
from bench.gpu.setting import CLASSES, MICROBATCHES, WIDTH, Net, Setting
from fxsplit.api.verify.compare import compare, run_pipeline_step, run_unsplit_step

SECOND = 2e9
"""Cycles of the GPU's clock that take about a second."""


def backward_runs_on_the_stream_of_its_forward(setting: Setting) -> tuple[bool, str]:
    """Record the current stream in an autograd function's forward and backward: it must be the same."""
    seen: dict[str, tuple[str, int]] = {}

    def look(what: str) -> None:
        stream = 0 if setting.dry else torch.cuda.current_stream().cuda_stream
        seen[what] = threading.current_thread().name, stream

    # An autograd function sees the thread and the stream that launch its kernels.
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            look("forward")
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            look("backward")
            return gradient

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.b(Look.apply(self.a(x)))  # type: ignore[no-untyped-call]
            return scores

    x, y = setting.make_batch(torch.float32)
    with setting.compile(Watched().to(setting.device), 2, example_inputs=x) as pipe:
        pipe.step(x, target=y)
    return seen["forward"][1] == seen["backward"][1], f"{seen}"


def inputs_made_on_a_side_stream(setting: Setting) -> tuple[bool, str]:
    """Step in the context of a stream that makes the inputs late: workers must wait for this stream."""
    if setting.dry:
        return True, "needs a GPU"
    x, y = setting.make_batch()
    model = Net().double().to(setting.device)
    expected = run_unsplit_step(copy.deepcopy(model), [x], y, F.cross_entropy, MICROBATCHES)
    difference = 0.0
    with setting.compile(model, 3, example_inputs=x) as pipe:
        side = torch.cuda.Stream()
        # A race shows only now and then, so one step proves little.
        for _ in range(20):
            model.zero_grad()
            with torch.cuda.stream(side):
                setting.occupy(0.01 * SECOND)
                late = x * 1.0
                difference = max(difference, compare(run_pipeline_step(pipe, [late], y), expected).gradient)
            setting.synchronize()
    return difference < CLOSE, f"gradients differ by {difference:.1e}"


def a_trace_has_every_action(setting: Setting) -> tuple[bool, str]:
    """Trace a step: each stage's forward and backward of each microbatch has a span of positive length."""
    x, y = setting.make_batch()
    with setting.compile(Net().double().to(setting.device), 3, example_inputs=x, schedule="1F1B") as pipe:
        pipe.step(x, target=y)
        measured, _ = pipe.trace(x, target=y)
        stages = len(pipe.plan.stages)
    spans = [span for row in measured.spans for span in row]
    holds = len(spans) == 2 * stages * MICROBATCHES and all(s.end_ms > s.begin_ms for s in spans)
    return holds, f"{len(spans)} spans of {stages} stages, such as {spans[0]}"


def a_step_does_not_wait(setting: Setting) -> tuple[bool, str]:
    """Time how soon step() returns while the GPU runs a kernel of a second: step() only queues work."""
    x, y = setting.make_batch()
    with setting.compile(Net().double().to(setting.device), 2, example_inputs=x) as pipe:
        pipe.step(x, target=y)
        # From here on the GPU is busy, and step() queues its work after this kernel.
        setting.synchronize()
        setting.occupy(SECOND)
        begin = time.perf_counter()
        pipe.step(x, target=y)
        returned = time.perf_counter()
        setting.synchronize()
        took_s, left_s = returned - begin, time.perf_counter() - returned
    said = f"step() returned after {took_s:.3f} s behind a kernel of about 1 s, which took {left_s:.3f} s more"
    return setting.dry or took_s < max(0.6, left_s), said
