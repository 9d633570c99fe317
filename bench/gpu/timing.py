"""Time queued work: until the call returns, until the GPU is done, and on the GPU itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.gpu.setting import Setting
from bench.networks.transformer import Encoder

WARM_UP = 2


class Taken(NamedTuple):
    """Medians: until the call returned, until the GPU was done, and between two events on the GPU."""

    host_ms: float
    wall_ms: float
    gpu_ms: float


class Size(NamedTuple):
    """A transformer and its batch; `rows` counts the rows of one microbatch."""

    width: int
    layers: int
    length: int
    rows: int
    n_microbatches: int
    dtype: torch.dtype


SIZES = {
    "large bf16": Size(2048, 24, 512, 8, 8, torch.bfloat16),
    "middle bf16": Size(1024, 12, 512, 4, 8, torch.bfloat16),
    "small bf16": Size(512, 12, 128, 2, 8, torch.bfloat16),
    "tiny fp32": Size(128, 12, 32, 1, 16, torch.float32),
}
"""From sizes bound by the GPU to sizes bound by the host."""
DRY = Size(8, 1, 4, 1, 4, torch.float32)


class Case(NamedTuple):
    """A model with a batch, and the floating-point operations of one training step."""

    model: nn.Module
    x: Tensor
    y: Tensor
    n_microbatches: int
    flops: float

    @classmethod
    def build(cls, setting: Setting, name: str) -> Case:
        """Return the case of a size; a dry run has one small size for all names."""
        size = DRY if setting.dry else SIZES[name]
        torch.manual_seed(0)
        model = Encoder(width=size.width, heads=8, layers=size.layers, length=size.length)
        model = model.to(setting.device, size.dtype)
        rows = size.rows * size.n_microbatches
        x = torch.randint(0, 1000, (rows, size.length), device=setting.device)
        y = torch.randint(0, 10, (rows,), device=setting.device)
        tokens = rows * size.length
        # Forward and backward take six operations a parameter and token; attention's own products add to that.
        flops = 6.0 * sum(p.numel() for p in model.parameters()) * tokens
        flops += 12.0 * size.layers * size.length * size.width * tokens
        return cls(model, x, y, size.n_microbatches, flops)

    def run_unsplit(self) -> None:
        """Take one training step of the unsplit model, microbatch by microbatch."""
        self.model.zero_grad()
        n = self.n_microbatches
        for a, b in zip(self.x.chunk(n), self.y.chunk(n), strict=True):
            (F.cross_entropy(self.model(a), b) / n).backward()


def measure(setting: Setting, run: Callable[[], Any], rounds: int) -> Taken:
    """Return how long `run` takes, after two rounds of warm-up."""
    return measure_in_turns(setting, [run], rounds)[0]


def measure_in_turns(setting: Setting, runs: Sequence[Callable[[], Any]], rounds: int) -> list[Taken]:
    """Return how long each run takes, after two rounds of warm-up.

    Runs take turns, so that a GPU that gets warm, or another program on the machine, slows down all of them.
    """
    taken: list[list[tuple[float, float, float]]] = [[] for _ in runs]
    for turn in range(WARM_UP + rounds):
        for column, run in zip(taken, runs, strict=True):
            once = _measure_once(setting, run)
            if turn >= WARM_UP:
                column.append(once)
    return [Taken(*(median(values) for values in zip(*column, strict=True))) for column in taken]


def _measure_once(setting: Setting, run: Callable[[], Any]) -> tuple[float, float, float]:
    """Return the milliseconds until `run` returned, until the GPU was done, and between two events on the GPU."""
    # Finish the work of the round before.
    setting.synchronize()
    events = [] if setting.dry else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    begin = time.perf_counter()
    for event in events[:1]:
        event.record()
    run()
    for event in events[1:]:
        event.record()
    # The host has queued everything; if that took as long as the GPU's work, the GPU waits for the host.
    host_s = time.perf_counter() - begin
    setting.synchronize()
    wall_s = time.perf_counter() - begin
    return 1e3 * host_s, 1e3 * wall_s, events[0].elapsed_time(events[1]) if events else 0.0
