"""Plan for a cluster that is not at hand: measure a model by its shapes, then plan it for `machine.toml`.

    cd examples/cluster
    python measure.py                                   # writes profile.json, with neither weights nor GPUs
    fxsplit plan profile.json --machine machine.toml --n-microbatches 16
    fxsplit plan profile.json --machine machine.toml --n-microbatches 16 --json > plan.json
    fxsplit simulate --plan plan.json                   # the time of a step, and a drawing of it
    fxsplit report plan.json --profile profile.json -o report.html

Planned times are the times of this machine, divided by the `speed` in `machine.toml`: they are as good as that figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import fxsplit

WORDS, MICROBATCHES = 1000, 16


class Block(nn.Module):
    """One layer of a decoder: attention to earlier words, then a network of two matrices."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states [rows, length, width] after the layer."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heard = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heard.transpose(1, 2).flatten(2))
        after: Tensor = x + self.mlp(self.norm2(x))
        return after


class Decoder(nn.Module):
    """Words in, scores of the next word out."""

    def __init__(self, layers: int, width: int, heads: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores [rows, length, WORDS] of the words [rows, length]."""
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def main() -> None:
    """Measure the model, and write its profile."""
    parser = argparse.ArgumentParser(description="Measure a decoder by its shapes.")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="layers of the model")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="numbers in a hidden state")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), metavar="FILE", help="the profile to write")
    options = parser.parse_args()
    with fxsplit.without_weights():  # shapes only: they take no memory, however large the model is
        model = Decoder(options.layers, options.width)
    words = torch.randint(WORDS, (2 * MICROBATCHES, 64))
    costs = fxsplit.profile(model, words, n_microbatches=MICROBATCHES)
    costs.save(options.out)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"measured {len(costs.nodes)} nodes of a model of {size:,} parameters: {options.out}")


if __name__ == "__main__":
    main()
