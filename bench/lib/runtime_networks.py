"""The networks of the runtime's benchmarks, with a batch each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench import networks as zoo
from bench.networks.transformer import Encoder


@dataclass(frozen=True)
class Case:
    """A network by name, the rows of its batch, and its number of microbatches."""

    network: str
    rows: int
    n_microbatches: int

    def __str__(self) -> str:
        return f"{self.network}, {self.rows} rows, {self.n_microbatches} microbatches"


TINY = Case("tiny", 4, 2)
"""The smallest case, with which tests run the benchmarks."""


# Two layers of four numbers: their own work is far below the runtime's.
class Empty(nn.Module):
    """Two stages with next to nothing to compute, so that the runtime's own time shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return two small products."""
        out: Tensor = self.second(self.first(x))
        return out


def build(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network, always with the same weights, its inputs and its targets."""
    torch.manual_seed(0)
    if case.network == "transformer":
        model: nn.Module = Encoder(width=256, heads=8, layers=12, length=128)
        return model, torch.randint(0, 1000, (case.rows, 128)), _draw_classes(case)
    if case.network == "tiny":
        return (
            Encoder(width=16, heads=2, layers=2, length=8),
            torch.randint(0, 1000, (case.rows, 8)),
            _draw_classes(case),
        )
    if case.network == "empty":
        return Empty(), torch.randn(case.rows, 4), torch.randint(0, 4, (case.rows,))
    # Small images, so that a step of a convolutional network on two threads takes about a second.
    side = {"resnet50": 96, "vgg16": 64}[case.network]
    model = zoo.build(case.network, num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # no dropout, because the runtimes would draw differently
    return model, torch.randn(case.rows, 3, side, side), _draw_classes(case)


def _draw_classes(case: Case) -> Tensor:
    """Return a target: the class of each row."""
    return torch.randint(0, 10, (case.rows,))
