"""Sums of gradients: added in place only where nobody else can see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit.torch_internals.grad_sums import Sums, find_unshared


def asked(outputs: Tensor, leaves: list[Tensor]) -> list[bool]:
    return find_unshared(torch.autograd.grad([outputs], leaves, [torch.ones_like(outputs)], allow_unused=True))


def test_gradients_that_are_ours_alone() -> None:
    """Those of layers' weights, transposed ones too: to add in place there spares memory of all weights' size."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8), nn.LayerNorm(8))
    assert asked(model(torch.randn(2, 3, 8, 8)), list(model.parameters())) == [True] * 8
    w = torch.ones(2, 2, requires_grad=True)
    assert find_unshared([None]) == [False] and asked(w.t() * 2, [w]) == [True]


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
