"""Shapes of autograd graphs: equal ones are known again, and every difference that matters is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxsplit.torch_internals.autograd.graph_shape import GraphShape

W, V, X = (torch.randn(2, 2, requires_grad=True) for _ in range(3))
NUMBERS = {id(W): 0, id(V): 1}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Thrice(Twice):
    pass


def call(function: Any, x: Tensor) -> Tensor:
    out: Tensor = function.apply(x)
    return out


Graph = Callable[[], list[Tensor]]
GRAPHS: dict[str, Graph] = {
    "layer": lambda: [torch.tanh(X @ W) + V],
    "another operator": lambda: [torch.sigmoid(X @ W) + V],
    "a node more": lambda: [torch.tanh(X @ W).neg() + V],
    "an edge more": lambda: [torch.addmm(V, X, W).tanh()],
    "other leaf": lambda: [torch.tanh(X @ V) + W],
    "one leaf twice": lambda: [torch.tanh(X @ W) + W],
    "a leaf that does not matter": lambda: [torch.tanh(X @ W) + X],
    "no gradient for an argument": lambda: [torch.tanh(X.detach() @ W) + V],
    "a leaf is a root too": lambda: [torch.tanh(X @ W) + V, W],
    "another leaf is a root too": lambda: [torch.tanh(X @ W) + V, V],
    "two roots": lambda: [torch.tanh(X @ W), X + V],
    "two roots, turned": lambda: [X + V, torch.tanh(X @ W)],
    "first output": lambda: [W.unbind(0)[0] * V],
    "second output": lambda: [W.unbind(0)[1] * V],
    "both outputs": lambda: [W.unbind(0)[1] * V, W.unbind(0)[0]],
    "both outputs of one node": lambda: [(rows := W.unbind(0))[1] * V, rows[0]],
    "function": lambda: [call(Twice, X @ W)],
    "other function": lambda: [call(Thrice, X @ W)],
    "two nodes": lambda: [(X * W).exp() + (X * W).exp()],
    "one node twice": lambda: [(shared := (X * W).exp()) + shared],
    "two nodes below": lambda: [(X * W).exp() + (X * W).sin()],
    "one node twice below": lambda: [(shared := X * W).exp() + shared.sin()],
    "stacks of 1, 2 and 1": lambda: [torch.stack([W]), torch.stack([V, W]), torch.stack([W])],
    "stacks of 1, 1 and 2": lambda: [torch.stack([W]), torch.stack([V]), torch.stack([W, W])],
    "nothing": list,
    "a leaf": lambda: [W],
}


@pytest.mark.parametrize("name", list(GRAPHS))
def test_graphs_of_one_shape_are_known_and_others_are_not(name: str) -> None:
    positions: dict[Any, int] = {}
    roots = GRAPHS[name]()
    shape = GraphShape(roots, NUMBERS, positions)
    same = shape.match(roots, NUMBERS)
    assert same == list(positions) and list(positions.values()) == list(range(len(positions)))
    for other, make in GRAPHS.items():
        again = make()
        found = shape.match(again, NUMBERS)
        assert (found is not None) == (other == name), other
        assert found is None or [type(node) for node in found] == [type(node) for node in same]


def test_numbers_are_of_the_shape() -> None:
    """A weight that is trained now and was not, as one that was frozen and is not a leaf of the stage's any more."""
    roots = GRAPHS["layer"]()
    shape = GraphShape(roots, NUMBERS, {})
    assert shape.match(roots, {id(W): 0}) is None
    assert shape.match(roots, {id(W): 1, id(V): 0}) is None
    assert shape.match(roots, NUMBERS | {id(X): 2}) is None
    assert shape.match(roots, NUMBERS | {7: 3}) is not None, "a leaf that is not in the graph"


def test_other_sizes_have_the_same_shape() -> None:
    w, b = torch.randn(4, 2, requires_grad=True), torch.randn(4, requires_grad=True)
    numbers = {id(w): 0, id(b): 1}
    first, second = (F.linear(torch.randn(rows, 2), w, b) for rows in (3, 5))
    assert GraphShape([first], numbers, {}).match([second], numbers) is not None
