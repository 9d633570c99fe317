"""Sums of gradients are added in place only if nothing else can see the write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fxsplit.torch_internals.autograd.sums import Sums, differentiate, find_unshared, make_shares


def asked(outputs: Tensor, leaves: list[Tensor]) -> list[bool]:
    return find_unshared(torch.autograd.grad([outputs], leaves, [torch.ones_like(outputs)], allow_unused=True))


def test_gradients_that_are_ours_alone() -> None:
    """Weight gradients of layers are unshared, even if transposed. Adding in place saves memory for all weights."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8), nn.LayerNorm(8))
    assert asked(model(torch.randn(2, 3, 8, 8)), list(model.parameters())) == [True] * 8
    w = torch.ones(2, 2, requires_grad=True)
    assert find_unshared([None]) == [False] and asked(w.t() * 2, [w]) == [True]
    x, v = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    found = torch.autograd.grad((x @ w) * v, [x, w, v], torch.ones(2, 2))
    assert find_unshared(found, 1, 3) == [True, True] and find_unshared(found, 1, 1) == []


@pytest.mark.parametrize("threads", [True, False])
def test_gradients_with_and_without_threads_of_autograds_own(threads: bool) -> None:
    x, w, unused = (torch.ones(2, 2, requires_grad=True) for _ in range(3))
    out = x @ w
    with torch.autograd.set_multithreading_enabled(threads):
        of_w, of_unused, of_edge = differentiate([out], [torch.ones(2, 2)], [w, unused, get_gradient_edge(out)], True)
        assert of_w is not None and of_w.tolist() == [[2, 2], [2, 2]] and of_unused is None
        assert of_edge is not None and not of_w.requires_grad and w.grad is None
        differentiate([out], [torch.ones(2, 2)], [x])
        with pytest.raises(RuntimeError, match="a second time"):
            differentiate([out], [torch.ones(2, 2)], [x])


def test_gradients_that_others_refer_to() -> None:
    a, b = (torch.ones(4, requires_grad=True) for _ in range(2))
    assert asked(a + b, [a, b]) == [False, False]  # one tensor for both
    assert asked(a.sum(), [a]) == [False]  # expanded: one number in memory
    assert asked(torch.cat([a, b]) * 2, [a, b]) == [False, False]  # two views of one
    table = torch.ones(5, 2, requires_grad=True)
    rows = nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    assert asked(rows, [table]) == [False]


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_that_a_hook_has_stored(transposed: bool) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    seen: list[Tensor] = []
    (weight.t() if transposed else weight).mul(2).sum().backward()
    hook = weight.register_hook(seen.append)
    h = weight.t() if transposed else weight.clone()
    h.register_hook(seen.append)
    assert asked(h * 3, [weight]) == [False]
    hook.remove()


def test_what_is_not_ours_is_never_written_to() -> None:
    """Whatever the order, sums are right and no gradient that somebody else holds has changed."""
    leaf, sums = torch.zeros(3, requires_grad=True), Sums()
    given: list[Any] = [torch.full((3,), float(i)) for i in range(1, 5)]
    before = [g.clone() for g in given]
    for i, gradient in enumerate(given):
        sums.add([(leaf, gradient, i == 2)])
    assert torch.equal(sums.totals[leaf], torch.full((3,), 10.0))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    own = Sums()
    own.add([(leaf, given[0], True)])
    own.add([(leaf, given[1], False)])
    assert own.totals[leaf] is given[0] and torch.equal(given[0], torch.full((3,), 3.0))


def test_sums_of_sparse_and_dense_gradients() -> None:
    """In every order; a leaf's first gradient decides whether the sum is sparse until a dense one comes."""
    dense = torch.tensor([1.0, 2.0, 3.0])
    for order in ([dense.to_sparse(), dense], [dense, dense.to_sparse()], [dense.to_sparse(), dense.to_sparse()]):
        leaf, sums = torch.zeros(3, requires_grad=True), Sums()
        for gradient in order:
            sums.add([(leaf, gradient, False)])
        total = sums.totals[leaf]
        assert torch.equal(total.to_dense() if total.is_sparse else total, 2 * dense)


def test_gradients_of_what_is_asked_alone() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    out = a * b
    found = differentiate([out], [torch.full((2,), 3.0)], [a, c], retain_graph=True)
    assert found[0] is not None and found[0].tolist() == [3, 3] and found[1] is None and a.grad is None
    (of_square,) = differentiate([a.square()], [torch.ones(2)], [a])
    assert of_square is not None and not of_square.requires_grad, "no graph of the backward"
    differentiate([out], [torch.ones(2)], [b])
    with pytest.raises(RuntimeError, match="second time"):
        differentiate([out], [torch.ones(2)], [b])


def test_shares_leave_out_what_got_no_gradient() -> None:
    a, b, gradient = torch.ones(1), torch.ones(1), torch.ones(1)
    assert make_shares([a, b], [None, gradient], [False, True]) == [(b, gradient, True)]
