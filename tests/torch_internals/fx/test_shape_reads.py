"""Nodes that depend only on shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxsplit.torch_internals.fx.shape_reads import reads_shape


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x.size(), True),
        (lambda x: x.shape, True),
        (lambda x: x.dtype, True),
        (lambda x: torch.numel(x), True),
        (lambda x: torch.ops.aten.sym_size.int(x, 0), True),
        (lambda x: x.item(), False),
        (lambda x: x.device, False),
        (lambda x: x.sum(), False),
        (lambda x: x.data, False),
    ],
)
def test_values_are_told_from_shapes(function: Callable[[Tensor], Any], found: bool) -> None:
    graph = fx.symbolic_trace(function).graph
    node = next(n for n in graph.nodes if n.op.startswith("call"))
    assert reads_shape(node) is found
