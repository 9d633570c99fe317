"""Checks of memory: after a failed step, during a step, and the layout of weights."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.peaks import judge_peaks, measure_peak_gib, predict_gib
from bench.gpu.setting import CLASSES, FAST, WIDTH, Setting
from bench.networks.transformer import Encoder
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.ir.facts.costs.costs import Costs

# Large enough that activations, and not workspaces of libraries, are most of the memory.
SIZE = {"width": 1024, "heads": 16, "layers": 8, "length": 512}
DRY_SIZE = {"width": 128, "heads": 4, "layers": 6, "length": 128}


class Breakable(nn.Module):
    """A layer that asks for more memory than there is, if it is `broken`."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, or raise torch.OutOfMemoryError."""
        if self.broken:
            torch.empty(2**40, device=x.device)
        return x * 1.0


def failed_steps_keep_no_memory(setting: Setting) -> tuple[bool, str]:
    """Let three steps run out of memory: their memory is given back without a garbage collection."""
    if setting.dry:
        return True, "needs a GPU"
    breakable = Breakable()
    layers = [*(nn.Linear(2000, 2000) for _ in range(4)), breakable, nn.Linear(2000, CLASSES)]
    x, y = torch.randn(8000, 2000, device=setting.device), torch.randint(0, CLASSES, (8000,), device=setting.device)
    model = nn.Sequential(*layers).to(setting.device)
    # The leaf stays one node, so the graph calls the module's own forward and sees `broken`.
    with setting.compile(model, 2, example_inputs=x, passes="leaf{path=4}," + FAST) as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        setting.synchronize()
        # After one good step the pools hold the memory of a step.
        before = torch.cuda.memory_allocated()
        breakable.broken = True
        failures = sum(_runs_out_of_memory(lambda: pipe.step(x, target=y)) for _ in range(3))
        kept = torch.cuda.memory_allocated() - before
        gc.collect()
        collected = torch.cuda.memory_allocated() - before
    return failures == 3 and kept < 2**20, f"{failures} failures keep {kept:,} bytes, {collected:,} after a collection"


def _runs_out_of_memory(run: Callable[[], object]) -> bool:
    """Return whether `run` raises torch.OutOfMemoryError."""
    try:
        run()
    except torch.OutOfMemoryError:
        return True
    return False


class Recurrent(nn.Module):
    """An LSTM: cuDNN wants its weights in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores: [rows, length, WIDTH] -> [rows, CLASSES]."""
        scores: Tensor = self.head(self.rnn(x)[0].mean(1))
        return scores


def recurrent_weights_stay_flat(setting: Setting) -> tuple[bool, str]:
    """Compile a recurrent model from host memory: cuDNN warns in each call if placing has scattered the weights."""
    # Built in host memory, and moved by the pipeline: nn.Module.to would keep the weights flat.
    x, y = torch.randn(32, 7, WIDTH), torch.randint(0, CLASSES, (32,)).to(setting.device)
    with setting.compile(Recurrent(), 2, example_inputs=x) as pipe:
        pipe.step(x, target=y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(x, target=y)
    told = [str(w.message)[:90] for w in caught if "contiguous" in str(w.message)]
    return not told, f"warnings {told}"


def peak_beside_the_plan(setting: Setting) -> tuple[bool, str]:
    """Compare the peak memory of a step with the plan's, under three schedules."""
    size = DRY_SIZE if setting.dry else SIZE
    model, length = Encoder(**size).to(setting.device), size["length"]
    x = torch.randint(0, 1000, (32, length), device=setting.device)
    y = torch.randint(0, 10, (32,), device=setting.device)
    found: dict[str, tuple[float, float]] = {}
    costs: Costs | None = None
    for schedule in ("GPipe", "1F1B", "ZB-H1"):
        options: dict[str, Any] = {"example_inputs": x, "schedule": schedule, "costs": costs}
        with setting.compile(model, 2 if setting.dry else 4, **options) as pipe:
            costs = pipe.costs

            def step(pipe: Pipeline = pipe) -> None:
                pipe.step(x, target=y)
                setting.synchronize()

            for _ in range(2):  # the first step fills the allocator's pools
                step()
            found[schedule] = measure_peak_gib(setting, model, step), predict_gib(pipe)
    return judge_peaks(found, dry=setting.dry)
