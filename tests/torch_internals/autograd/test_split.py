"""Branch nodes, at which the path to a weight leaves the path to a stage's inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.torch_internals.autograd import split as grad_split
from fxsplit.torch_internals.autograd.split import (
    Branch,
    BranchFinder,
    WeightBackward,
    collect_weight_backwards,
    find_branch_nodes,
)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def names(roots: list[Tensor], weights: list[Tensor]) -> list[tuple[str, int, int]]:
    """Return each branch node's name, how many edges go into it, and for how many weights."""
    nodes, _ = find_branch_nodes(roots, weights)
    return [(node.name(), len(branch.edges), len(branch.weights)) for node, branch in nodes.items()]


def test_a_product_is_the_branch_node_of_its_weight() -> None:
    x, w = leaf(3, 2), leaf(2, 2)
    out = torch.tanh(x @ w)
    nodes, without = find_branch_nodes([out], [w])
    ((node, (edges, weights, _)),) = nodes.items()
    assert node.name().startswith("MmBackward") and without == []
    assert [(edge.node, edge.output_nr) for edge in edges] == [(node, 0)] and weights == [w]


def test_weights_of_one_operator_share_its_node() -> None:
    x, w, b = leaf(3, 2), leaf(4, 2), leaf(4)
    assert names([F.linear(x, w, b).exp()], [w, b]) == [("AddmmBackward0", 1, 2)]
    w, b = leaf(4, 2), leaf(4)
    assert names([F.linear(x, w.t().contiguous().t(), b)], [w, b])[0][0] == "AddmmBackward0", (
        "past what leads to it alone"
    )


def test_each_used_output_of_the_node_is_an_edge() -> None:
    w = leaf(3)
    first, _, third = w.unbind(0)
    ((node, (edges, *_)),) = find_branch_nodes([third, first], [w])[0].items()
    assert node.name() == "UnbindBackward0" and [edge.output_nr for edge in edges] == [0, 2]


LAYERS: dict[str, Callable[[], tuple[Tensor, Tensor, int]]] = {
    "linear": lambda: (leaf(8, 64), leaf(32, 64), 8 * 64 * 32),
    "convolution": lambda: (leaf(2, 3, 10, 10), leaf(5, 3, 3, 3), 2 * 5 * 8 * 8 * 3 * 3 * 3),
    "scale": lambda: (leaf(7, 6), leaf(6), 7 * 6),
    "number": lambda: (leaf(7, 6), leaf(1)[0].detach().requires_grad_(), 7 * 6),
}
APPLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "convolution": F.conv2d,
    "scale": lambda x, w: x * w,
    "number": lambda x, w: x * w,
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_small_gradient_is_not_put_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put off from as many multiplications on as it is worth."""
    x, w, products = LAYERS[name]()
    out = APPLY[name](x.exp(), w).exp()
    for least, waits in ((products, True), (products + 1, False)):
        monkeypatch.setattr(grad_split, "LEAST_PRODUCTS", {"cpu": least})
        nodes, without = find_branch_nodes([out], [w])
        assert (len(nodes), without) == ((1, []) if waits else (0, [w]))
        assert len(find_branch_nodes([out], [w], small_too=True)[0]) == 1


def test_the_larger_of_two_weights_of_a_node_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_split, "LEAST_PRODUCTS", {"cpu": 3 * 2 * 4})
    x, w, b = leaf(3, 2), leaf(4, 2), leaf(4)
    assert names([F.linear(x, w, b).exp()], [w, b]) == [("AddmmBackward0", 1, 2)]


def test_all_outputs_of_a_node_that_are_used_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_split, "LEAST_PRODUCTS", {"cpu": 8})
    w = leaf(3, 2)
    first, _, third = w.unbind(0)
    assert len(find_branch_nodes([third, first], [w])[0]) == 1
    assert find_branch_nodes([third], [w])[0] == {}


def test_where_nothing_is_put_off_no_later_graph_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are searched again once their roots have other shapes, and then something may be put off."""
    monkeypatch.setattr(grad_split, "LEAST_PRODUCTS", {"cpu": 100})
    searched: list[bool] = []

    def search(*args: Any, **kwargs: Any) -> Any:
        searched.append(not kwargs)
        return find_branch_nodes(*args, **kwargs)

    monkeypatch.setattr(grad_split, "find_branch_nodes", search)
    finder, w = BranchFinder(), leaf(4, 5)
    for rows, waits, times in ((2, False, 1), (2, False, 1), (5, True, 2), (2, False, 2)):
        nodes, without = finder.find([F.linear(leaf(rows, 5).exp(), w).exp()], [w])
        assert (bool(nodes), bool(without)) == (waits, not waits)
        assert sum(searched) == times


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]


def apply_double(x: Tensor, w: Tensor) -> Tensor:
    out: Tensor = Double.apply(x, w)  # type: ignore[no-untyped-call]
    return out


WITHOUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "several users": lambda x, w: (x @ w) @ w,
    "a backward of the user's own": apply_double,
    "a root itself": lambda x, w: w,
}


@pytest.mark.parametrize("kind", list(WITHOUT))
def test_weights_without_a_branch_node(kind: str) -> None:
    x, w = leaf(2, 2), leaf(2, 2)
    nodes, without = find_branch_nodes([WITHOUT[kind](x, w)], [w])
    assert nodes == {} and len(without) == 1 and without[0] is w


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.PReLU(), nn.LSTM(2, 2)])
def test_fused_kernels_are_no_branch_nodes(layer: nn.Module) -> None:
    out = layer(leaf(3, 2))
    nodes, without = find_branch_nodes([out[0] if isinstance(out, tuple) else out], list(layer.parameters()))
    found = [node.name() for node in nodes]
    assert found == (["ViewBackward0"] if isinstance(layer, nn.PReLU) else []), "the view leads to the weight alone"
    assert len(found) + len(without) == len(list(layer.parameters()))


def test_a_path_that_ends_at_a_root_or_a_fused_kernel() -> None:
    """The last node that leads only to the weight is used instead of a branch node."""
    w = leaf(2)
    assert names([w * 2], [w]) == [("MulBackward0", 1, 1)]
    assert names([F.layer_norm(leaf(3, 2), (2,), w * 2)], [w]) == [("MulBackward0", 1, 1)]


def test_a_weight_that_nothing_reads_is_left_out() -> None:
    x, unused = leaf(2), leaf(2)
    assert find_branch_nodes([x * 2], [unused]) == ({}, [])
    assert find_branch_nodes([torch.ones(2)], [unused]) == ({}, [])


def test_backwards_through_branch_nodes_are_those_of_the_whole() -> None:
    x, w, v = leaf(3, 2), leaf(2, 2), leaf(2)
    out = (torch.tanh(x @ w) * v).exp()
    expected = torch.autograd.grad(out.sum(), [x, w, v], retain_graph=True)
    nodes, _ = find_branch_nodes([out], [w, v])
    edges = [edge for branch in nodes.values() for edge in branch.edges]
    ends: list[Any] = [x, *edges]
    of_x, *arrived = torch.autograd.grad(out.sum(), ends, retain_graph=True)
    assert torch.equal(of_x, expected[0])
    for left in collect_weight_backwards(nodes, arrived):
        (found,) = left.run()
        assert found is not None and torch.equal(found, expected[1] if left.weights[0] is w else expected[2])


def test_nodes_at_which_nothing_arrives_have_no_backward() -> None:
    edges: list[Any] = ["a", "b", "c"]
    w: Any = ["w"]
    v: Any = ["v"]
    nodes: Any = {"one": Branch(edges[:2], w, None), "two": Branch(edges[2:], v, None)}
    gradient = torch.ones(1)
    assert collect_weight_backwards(nodes, [None, gradient, None]) == [WeightBackward(edges[1:2], w, [gradient])]
    assert collect_weight_backwards(nodes, [gradient, None, gradient]) == [
        WeightBackward(edges[:1], w, [gradient]),
        WeightBackward(edges[2:], v, [gradient]),
    ]


def find_twice(
    finder: BranchFinder, make: Callable[[], tuple[list[Tensor], list[Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Compare a finder's result with a fresh search, and return whether the finder recognised the graph."""
    searches: list[int] = []

    def search(*args: Any, **kwargs: Any) -> Any:
        searches.append(1)
        return find_branch_nodes(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(grad_split, "find_branch_nodes", search)
        roots, trained = make()
        found, without = finder.find(roots, trained)
    expected, expected_without = find_branch_nodes(roots, trained)
    assert list(found) == list(expected) and list(map(id, without)) == list(map(id, expected_without))
    for ours, theirs in zip(found.values(), expected.values(), strict=True):
        assert ours.edges == theirs.edges and ours.product == theirs.product
        assert list(map(id, ours.weights)) == list(map(id, theirs.weights))
    return not searches


def test_a_finder_searches_each_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w, v, finder = leaf(2, 2), leaf(2), BranchFinder()
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.tanh(x @ w) * v,
        lambda x: torch.tanh(x @ w) + v,  # another type of node
        lambda x: torch.tanh(x @ w) * v.relu(),  # another path to a weight
        lambda x: torch.tanh(x @ w) * w[0],  # another leaf at the same place: the first one has two users then
    ]
    for turn in range(2):
        for kind in kinds:
            assert find_twice(finder, lambda kind=kind: ([kind(leaf(3, 2))], [w, v]), monkeypatch) is bool(turn)  # type: ignore[misc]
    # A fifth one takes the place of the first.
    assert not find_twice(finder, lambda: ([(leaf(3, 2) @ w).exp() * v], [w, v]), monkeypatch)
    assert not find_twice(finder, lambda: ([kinds[0](leaf(3, 2))], [w, v]), monkeypatch)


def test_a_finder_keeps_no_graph() -> None:
    finder = BranchFinder()

    def run() -> list[weakref.ref[Tensor]]:
        x, w = leaf(3, 2), leaf(2, 2)
        h = x @ w
        finder.find([h.tanh()], [w])
        finder.find([(leaf(3, 2) @ w).tanh()], [w])
        return [weakref.ref(x), weakref.ref(w), weakref.ref(h)]

    assert [ref() for ref in run()] == [None, None, None]
