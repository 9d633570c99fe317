"""A small transformer for torchtitan: forward() tolerates missing parts, and passes one tensor on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = x + self.outer(torch.relu(self.inner(self.norm(x) * scale)))
        return result


class Titan(nn.Module):
    scale: Tensor

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(layers)})
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 11)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            h = layer(h, self.scale)
        h = self.norm(h) if self.norm is not None else h
        result: Tensor = self.output(h) if self.output is not None else h
        return result
