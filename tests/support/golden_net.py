"""The model of the golden files in tests/proof/golden: two encoder layers with a residual, and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.ir.graph import IR


class Net(nn.Module):
    """The network in the texts of the golden files."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head of the residual sum; float32[rows, 8] gives float32[rows, 3]."""
        h = torch.relu(self.encoder[0](x))
        result: Tensor = self.head(self.encoder[1](h) + h)
        return result


class Noisy(nn.Module):
    """A network with draws, a batch norm and a size that a later node needs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers for each row; float32[rows, 8] gives float32[rows, 2]."""
        rows = x.shape[0]
        h = F.dropout(self.norm(self.one(x)), 0.5)
        return self.two(torch.tanh(h)).reshape(rows, 2)  # type: ignore[no-any-return]


def make_net() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the network and a batch of 16 rows."""
    return Net(), (torch.ones(16, 8),)


def make_noisy() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the network with draws and a batch of 16 rows."""
    return Noisy(), (torch.randn(16, 8, generator=torch.Generator().manual_seed(0)),)


def fail_at_head(ir: IR) -> IR:
    """Fail on the last layer: a pass for reproducers."""
    if any(str(node.target) == "head" for node in ir.gm.graph.nodes):
        raise ValueError("no rule for node 'c'")
    return ir


def lose_head(ir: IR) -> IR:
    """Return a graph that computes something else: a pass that the check of rewrites finds."""
    with ir.edited() as edit:
        last = edit.graph.find_nodes(op="call_module")[-1]
        last.replace_all_uses_with(last.args[0])
    return edit.ir


class NoPass:
    """A class that cannot be called with an IR."""


def leave(ir: IR) -> IR:
    """End the program, as no pass should."""
    raise SystemExit(3)


class Both(nn.Module):
    """A network that is called with an argument by position and one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
        """Return the sum of both; float32[rows, 8] gives float32[rows, 2]."""
        return self.two(self.one(x) + y)  # type: ignore[no-any-return]


def make_both() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the network, and a batch of 16 rows."""
    return Both(), (torch.ones(16, 8),), {"y": torch.ones(16, 8)}


def make_nested() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a network with a part of two layers, and a batch of 16 rows."""
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2)), (torch.ones(16, 8),)
