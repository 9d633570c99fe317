"""Subjects for tests of front ends and checks: a model and a call of it, without any compile around."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.call import Inputs


def make_subject(model: nn.Module, *args: Any, rows: int | None = None, **options: Any) -> Subject:
    """Return a subject of `model(*args)`, or of `model(x)` for six rows, with microbatches of `rows` rows."""
    inputs, tensors = Inputs.of(model, args or (torch.arange(24.0).reshape(6, 4) / 7 - 1,), {})
    return Subject(model, inputs, tensors, len(tensors[0]) if rows is None else rows, **options)


def trace(model: nn.Module) -> fx.GraphModule:
    """Return the graph from torch.fx itself."""
    return fx.symbolic_trace(model)


class Scale(nn.Module):
    """y = x * scale, with a parameter `scale` of four numbers."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale
