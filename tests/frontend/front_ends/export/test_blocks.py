"""Blocks of an exported program: their bodies, and which of them are only their nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from fxsplit.frontend.front_ends.export.blocks import Region, can_be_inlined, find_body, is_block, writes


class Calls(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x) + x


def find_block(call: Callable[[Tensor], Tensor]) -> tuple[fx.Node, int, fx.GraphModule]:
    program = torch.export.export(Calls(call), (torch.ones(3),), strict=False).module(check_guards=False)
    assert isinstance(program, fx.GraphModule)
    node = next(n for n in program.graph.nodes if is_block(n))
    return node, *find_body(program, node)


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 3


def under_no_grad_that_writes(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.add_(1)
    return y


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x * 3


def under_both(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return x * 3


@pytest.mark.parametrize(
    ("call", "inlined"), [(under_no_grad, True), (under_no_grad_that_writes, False), (under_both, False)]
)
def test_blocks_without_gradients_are_their_nodes_unless_they_do_more(
    call: Callable[[Tensor], Tensor], inlined: bool
) -> None:
    node, position, body = find_block(call)
    assert can_be_inlined(node.args[:position], body) == inlined
    assert not can_be_inlined((True,), body), "a block that enables gradients keeps its mode"


@pytest.mark.parametrize("call", [under_no_grad, under_autocast])
def test_a_region_is_the_block(call: Callable[[Tensor], Tensor]) -> None:
    node, position, body = find_block(call)
    assert callable(node.target)
    x = torch.ones(3, requires_grad=True)
    (found,) = Region(node.target, node.args[:position], body)(x)
    wanted = call(x)
    assert torch.equal(found, wanted) and found.requires_grad == wanted.requires_grad


def test_what_writes() -> None:
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")

    def norm(training: bool) -> fx.Node:
        return graph.call_function(aten.batch_norm.default, (x, None, None, x, x, training, 0.1, 1e-5, False))

    assert writes(graph.call_function(aten.add_.Tensor, (x, 1))) and writes(norm(training=True))
    assert not writes(graph.call_function(aten.add.Tensor, (x, 1))) and not writes(norm(training=False))
    assert not writes(x)
