"""The setting of the checks: the GPU, or with --dry the CPU, to see that the checks themselves work."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from bench.gpu.findings import Findings

FAST = "profile{repeats=1},augment,order,partition,emit"
"""Checks of values do not depend on how well the costs are measured."""
RECOMPUTING = FAST.replace("partition", "partition{recompute=always}")
# Chimera and the asynchronous schedules use the same streams in the same way.
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble")
CLASSES, WIDTH, ROWS, MICROBATCHES = 5, 64, 32, 8


@dataclass(frozen=True)
class Setting:
    """The device of all stages, whether this is only a dry run on the CPU, and the findings so far."""

    dry: bool = False
    findings: Findings = field(default_factory=Findings, compare=False)

    def note(self, what: str, **values: Any) -> None:
        """Add a finding: values by name, with their units."""
        self.findings.note(what, **values)

    @property
    def name(self) -> str:
        """Return the device's name."""
        return "cpu" if self.dry else "cuda:0"

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return torch.device(self.name)

    @property
    def schedules(self) -> Sequence[str]:
        """The schedules to try: in a dry run two of them, including one that splits backwards."""
        return ("1F1B", "ZB-H1") if self.dry else SCHEDULES

    def synchronize(self) -> None:
        """Wait until the GPU has done all its work."""
        if not self.dry:
            torch.cuda.synchronize()

    def occupy(self, cycles: float) -> None:
        """Keep the current stream busy for `cycles` cycles of the GPU's clock; 2e9 are about a second."""
        if not self.dry:
            # torch has no public function for a kernel of a known length.
            torch.cuda._sleep(int(cycles))

    def release_memory(self) -> None:
        """Free all unused memory, including that which torch's allocator and cuBLAS keep."""
        # Reference cycles keep tensors alive, and the allocator caches the memory of freed tensors.
        gc.collect()
        if not self.dry:
            # cuBLAS keeps a workspace for each stream that it has ever worked on: 32 MiB each on an H100.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def make_batch(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Return inputs [ROWS, WIDTH] and targets [ROWS], always the same."""
        # Made on the CPU and moved, so that a dry run sees the same numbers.
        torch.manual_seed(0)
        x = torch.randn(ROWS, WIDTH, dtype=dtype).to(self.device)
        return x, torch.randint(0, CLASSES, (ROWS,)).to(self.device)

    def compile(
        self, model: nn.Module, n_devices: int, n_microbatches: int = MICROBATCHES, **options: Any
    ) -> fxsplit.Pipeline:
        """Compile a model for `n_devices` devices, which are all the setting's device unless `devices` is given."""
        # Options of a check come last, and win.
        given = {"devices": [self.name] * n_devices, "passes": FAST, "loss_fn": F.cross_entropy, **options}
        return fxsplit.compile(model, n_microbatches=n_microbatches, **given)


class Net(nn.Module):
    """Linear layers with batch norm, dropout, writes in place, and a value that crosses every cut."""

    def __init__(self, layers: int = 6, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(layers))
        self.drop, self.head = nn.Dropout(drop), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores: [rows, WIDTH] -> [rows, CLASSES]."""
        # The last stage reads the first value, so it crosses every cut.
        first = x
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.drop(F.relu(norm(layer(x)), inplace=True))
        scores: Tensor = self.head(x + first)
        return scores


def flatten_gradients(model: nn.Module) -> Tensor:
    """Return all gradients of a model as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def largest_difference(vectors: Sequence[Tensor]) -> float:
    """Return the largest distance of any vector from the first vector, relative to the first one's norm."""
    first = vectors[0]
    return max(float((v - first).norm() / first.norm()) for v in vectors)
