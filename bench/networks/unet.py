"""A small U-Net: its skip connections are long, so values pass through many stages."""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import Tensor, nn


def _double(inside: int, outside: int) -> nn.Sequential:
    """Return two normalised convolutions."""
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [
            nn.Conv2d(channels, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images to maps of the same size: [batch, 3, height, width] -> [batch, classes, height, width]."""

    def __init__(self, classes: int = 4, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        # Halve the size and double the channels at each level.
        sizes = [width * 2**i for i in range(depth + 1)]
        self.enter = _double(3, width)
        self.down = nn.ModuleList(_double(a, b) for a, b in itertools.pairwise(sizes))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(_double(2 * a, a) for a in sizes[:-1])
        self.pool = nn.MaxPool2d(2)
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Go down and keep every level, then go up and join each level."""
        # Every level is kept until the way up reaches it.
        levels = [self.enter(image)]
        for down in self.down:
            levels.append(down(self.pool(levels[-1])))
        x = levels.pop()
        for rise, up in zip(reversed(self.rise), reversed(self.up), strict=True):
            x = up(torch.cat([levels.pop(), rise(x)], dim=1))
        return cast(Tensor, self.leave(x))
