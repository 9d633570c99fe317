"""Small models for tests, each with one feature that splitting could get wrong."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FAST = "profile{repeats=1},augment,order,partition,emit"


def take_grads(model: nn.Module) -> list[Tensor]:
    """Return the gradients of a model's parameters that have one, and clear them."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


class Residual(nn.Module):
    """A convolutional net with batch norm, a residual block and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        result: Tensor = self.head(self.relu(out).mean(dim=(2, 3)))
        return result


class Mlp(nn.Module):
    """A chain of linear layers."""

    def __init__(self, layers: int = 4, width: int = 16, inside: int = 8, classes: int = 3) -> None:
        super().__init__()
        sizes = [inside] + [width] * (layers - 1) + [classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        result: Tensor = self.layers[-1](x)
        return result


class ModeDependent(nn.Module):
    """Returns an auxiliary output in training only, and uses functional dropout with p=0 in both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(torch.tanh(self.a(x)))
        side = self.aux(x)
        x = self.head(F.dropout(torch.tanh(self.b(x)), p=0.0, training=self.training))
        return {"main": x, "aux": (side, None)} if self.training else x


class LateReader(nn.Module):
    """Reads a value before and after it is written in place: the order matters although no value flows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * 1.0
        before = x.detach() * 3.0
        view = x.view(-1)
        view.mul_(2.0)
        after = x + 1.0
        result: Tensor = self.c(torch.tanh(self.b(after))) + before
        return result


class Tied(nn.Module):
    """Two layers that share one weight, and a third use of it as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.end = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        result: Tensor = self.end(x + F.linear(x, self.first.weight))
        return result


class Buffers(nn.Module):
    """Counts calls in a buffer, and holds a non-persistent one and a free parameter."""

    calls: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = torch.tanh(self.a(x)) * self.scale + self.shift
        result: Tensor = self.b(x) + self.calls * 0.0
        return result


class ManyInputs(nn.Module):
    """Takes a dict, an optional mask, a flag and a keyword; integers cross the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor], mask: Tensor | None = None, *, double: bool = False) -> Any:
        x = self.embed(batch["ids"]) + batch["extra"]
        rows, length = x.shape[0], x.shape[1]
        x = torch.tanh(self.a(x))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        if double:
            x = x * 2
        x = x.reshape(rows * length, -1)
        return {"scores": self.b(x).reshape(rows, length, -1), "kind": "scores"}


class Chunked(nn.Module):
    """Splits a tensor into a tuple and uses its parts far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.a(x).chunk(3, dim=-1)
        result: Tensor = self.c(torch.tanh(self.b(torch.tanh(one))) + two * three)
        return result


class Breaks(nn.Module):
    """Raises in the middle when its input contains a marked value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = explode(torch.tanh(self.a(x)))
        result: Tensor = self.b(x)
        return result


class Boom(ValueError):
    """The error of `explode`."""


def explode(x: Tensor) -> Tensor:
    """Return x, or raise Boom if it is not finite."""
    if not torch.isfinite(x).all():
        raise Boom("not finite")
    return x


torch.fx.wrap("explode")


class Two(nn.Module):
    """Two layers; `narrow` adds a branch on a shape, which sends the model to torch.export."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def narrow(self, x: Tensor) -> None:
        if x.shape[-1] != 4:
            raise ValueError("four features")


class FrozenNorm(nn.Module):
    """Keeps batch norm in evaluation in every mode, and uses a parameter directly."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.norm(self.a(x)) * self.scale)
        return result


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient
