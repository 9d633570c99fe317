"""A mixture of experts in Hugging Face's form: one matrix for each expert, and rows sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_EXPERTS = 4


class Mixture(nn.Module):
    """Rows of 8 numbers to rows of 8 numbers. Its operator takes float32, and that operator's fake kernel does not."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, width), nn.Linear(width, N_EXPERTS), nn.Linear(2 * width, 8)
        self.experts = nn.Parameter(torch.randn(N_EXPERTS, width, 2 * width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Send each row through the expert with the highest gate."""
        h = torch.tanh(self.first(x))
        chosen = self.gate(h).argmax(1)
        order = chosen.argsort()
        ends = torch.cumsum(F.one_hot(chosen, N_EXPERTS).sum(0), 0, dtype=torch.int32)
        h = F.grouped_mm(h[order], self.experts, offs=ends)
        result: Tensor = self.last(h[order.argsort()])
        return result
