"""A transformer encoder written operator by operator, so that cuts fall inside its blocks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention: [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over all positions."""
        # One product for queries, keys and values, as is usual.
        query, key, value = self.project(x).chunk(3, dim=-1)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*split)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(-2)))


class Block(nn.Module):
    """Attention and a feed-forward network, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the same shape."""
        # Two residual sums: their inputs bypass the attention and the network, and cross every cut inside the block.
        x = x + self.attention(self.norm1(x))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    """A classifier of token sequences: int64 [batch, length] -> [batch, classes]."""

    def __init__(
        self,
        vocabulary: int = 1000,
        width: int = 64,
        heads: int = 4,
        layers: int = 4,
        length: int = 64,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(1, length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return class scores from the mean over positions."""
        # Written operator by operator: nn.TransformerEncoder would be one node that cannot be cut.
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x).mean(dim=1)))
