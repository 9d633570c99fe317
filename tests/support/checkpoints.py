"""A model with many of the things that a checkpoint must hold, its optimizer, and their state to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import fxsplit

X, Y = torch.arange(24) % 7, torch.arange(24) % 11


class Net(nn.Module):
    """Tied weights, running statistics, a mask of bool, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.arange(8) > 1)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.words(tokens)) * self.mask)
        return found


def make_adamw(model: nn.Module) -> Optimizer:
    """Return AdamW with the usual groups: weight decay for matrices only."""
    matrices = [w for w in model.parameters() if w.ndim > 1]
    others = [w for w in model.parameters() if w.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.AdamW(groups, lr=0.01)


def build(seed: int = 0, make: Callable[[nn.Module], Optimizer] = make_adamw) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, make(model)


def cut(model: nn.Module, n: int) -> fxsplit.Pipeline:
    return fxsplit.compile(model, ["cpu"] * n, example_inputs=X, loss_fn=cross_entropy, n_microbatches=4)


def step(run: nn.Module, optimizer: Optimizer) -> float:
    optimizer.zero_grad()
    if isinstance(run, fxsplit.Pipeline):
        loss = run.step(X, target=Y)
    else:
        loss = cross_entropy(run(X), Y)
        loss.backward()
    optimizer.step()
    return float(loss.detach())


def read(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return everything that a checkpoint must restore, by name."""
    names = {id(w): name for name, w in reversed([*model.named_parameters(remove_duplicate=False)])}
    state = {f"{names[id(w)]} {key}": v for w, kept in optimizer.state.items() for key, v in kept.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy({**model.state_dict(), **state, "groups": groups})


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def save_three_steps(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Save a checkpoint after three steps of a pipeline on two devices; return its path and the expected contents."""
    model, optimizer = build()
    with cut(model, 2) as pipe:
        for _ in range(3):
            step(pipe, optimizer)
        optimizer.param_groups[0]["lr"] = 0.005
        found = fxsplit.save_checkpoint(folder, pipe, optimizer, step=3, extra={"epoch": 1}).wait()
    assert found == folder / "step-3"
    return found, read(model, optimizer)
