"""Eight small networks of popular kinds, each with a batch that is mostly activations or mostly weights.

Every constructor returns a model, a batch of `rows` rows, and the class of each row or token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.networks.transformer import Block

Case = tuple[nn.Module, Tensor, Tensor]
"""A model, its batch and its target."""


def make_mlp(rows: int) -> Case:
    """Return a stack of linear layers, which is mostly weights."""
    widths = [64, *[384] * 6, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(rows, 64), torch.randint(10, (rows,))


class Gpt(nn.Module):
    """A language model with one weight for embedding and head: int64 [rows, length] -> [rows * length, words]."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every token."""
        found: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.position)))
        return found.transpose(1, 2)


def make_gpt(rows: int) -> Case:
    """Return a language model with tied weights."""
    return Gpt(2000, 96, 4, 32), torch.randint(2000, (rows, 32)), torch.randint(2000, (rows, 32))


class Bert(nn.Module):
    """An encoder with torch's own layers and a pooler: int64 [rows, length] -> [rows, classes]."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList([layer])
        self.layers.extend(
            [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(layers - 1)]
        )
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every row."""
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(torch.tanh(self.pool(x[:, 0]))))


def make_bert(rows: int) -> Case:
    """Return an encoder with dropout."""
    return Bert(1000, 96, 4, 32), torch.randint(1000, (rows, 32)), torch.randint(10, (rows,))


class Residual(nn.Module):
    """Two convolutions with batch norms, added to their input."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return F.relu(self.around(x) + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


def make_resnet(rows: int) -> Case:
    """Return a residual network with batch norm, which is mostly activations."""
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


def make_vgg(rows: int) -> Case:
    """Return convolutions in front of a classifier that holds most of the weights."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [
        nn.Flatten(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    ]
    return nn.Sequential(*layers), torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


class Dense(nn.Module):
    """Layers that each read all earlier outputs: [rows, channels, ...] -> with `count * growth` channels more."""

    def __init__(self, channels: int, growth: int, count: int) -> None:
        super().__init__()
        sizes = [channels + i * growth for i in range(count)]
        self.norms = nn.ModuleList([nn.BatchNorm2d(size) for size in sizes])
        self.layers = nn.ModuleList([nn.Conv2d(size, growth, 3, padding=1, bias=False) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        """Return all features."""
        found = [x]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            found.append(layer(F.relu(norm(torch.cat(found, 1)))))
        return torch.cat(found, 1)


def make_densenet(rows: int) -> Case:
    """Return a network that concatenates its features repeatedly."""
    between = [nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 20, 1, bias=False), nn.AvgPool2d(2)]
    layers = [nn.Conv2d(3, 16, 3, padding=1), Dense(16, 6, 4), *between, Dense(20, 6, 4), nn.AdaptiveAvgPool2d(1)]
    return (
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(44, 10)),
        torch.randn(rows, 3, 32, 32),
        torch.randint(10, (rows,)),
    )


class Unet(nn.Module):
    """Convolutions down and up again, with skip connections: [rows, 3, s, s] -> [rows, 5, s, s]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes)])
        self.up = nn.ModuleList(
            [nn.Conv2d(6 * width, 2 * width, 3, padding=1), nn.Conv2d(3 * width, width, 3, padding=1)]
        )
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a class for each pixel."""
        one = F.relu(self.down[0](x))
        two = F.relu(self.down[1](F.max_pool2d(one, 2)))
        x = F.relu(self.down[2](F.max_pool2d(two, 2)))
        for beside, layer in zip((two, one), self.up, strict=True):
            x = F.relu(layer(torch.cat([beside, F.interpolate(x, scale_factor=2.0)], 1)))
        return cast(Tensor, self.head(x))


def make_unet(rows: int) -> Case:
    """Return a U-Net, whose skip connections may cross several cuts."""
    return Unet(12), torch.randn(rows, 3, 32, 32), torch.randint(5, (rows, 32, 32))


class Recurrent(nn.Module):
    """Two LSTMs and a head: int64 [rows, length] -> [rows, classes]."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.one, self.two = nn.LSTM(width, width, batch_first=True), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every row."""
        x, _ = self.one(self.embed(tokens))
        x, _ = self.two(x)
        return cast(Tensor, self.head(x[:, -1]))


def make_lstm(rows: int) -> Case:
    """Return a recurrent network."""
    return Recurrent(500, 128), torch.randint(500, (rows, 16)), torch.randint(10, (rows,))


NETWORKS: dict[str, Callable[[int], Case]] = {
    "MLP": make_mlp,
    "tied GPT": make_gpt,
    "encoder": make_bert,
    "ResNet": make_resnet,
    "VGG": make_vgg,
    "DenseNet": make_densenet,
    "U-Net": make_unet,
    "LSTM": make_lstm,
}
"""The networks by name."""

SCHEDULES: Sequence[str] = ("GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "PipeDream-2BW")
