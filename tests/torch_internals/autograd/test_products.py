"""Weight gradients of products equal autograd's bit by bit, or are None if autograd must compute them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxsplit.torch_internals.autograd.products import differentiate_product, find_product
from fxsplit.torch_internals.autograd.split import find_branch_nodes


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


Call = Callable[[Tensor, Tensor, Tensor], Tensor]
PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Call]] = {
    "linear": ((6, 3), (5, 3), F.linear),
    "linear of sequences": ((2, 6, 3), (5, 3), F.linear),
    "linear of sequences, not in one piece": ((3, 6, 2), (5, 3), lambda x, w, b: F.linear(x.transpose(0, 2), w, b)),
    "linear without bias": ((6, 3), (5, 3), lambda x, w, b: F.linear(x, w)),
    "of one row": ((1, 3), (5, 3), F.linear),
    "to one column": ((6, 3), (1, 3), F.linear),
    "addmm": ((6, 3), (3, 5), lambda x, w, b: torch.addmm(b, x, w)),
    "mm": ((6, 3), (3, 5), lambda x, w, b: x @ w),
    "of sequences": ((2, 6, 3), (3, 5), lambda x, w, b: x @ w),
}


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_gradients_are_those_of_autograd_to_the_bit(name: str) -> None:
    for dtype, order in itertools.product((torch.float32, torch.float64, torch.bfloat16), ("rows", "columns", "gaps")):
        check_product(name, order, dtype)


def check_product(name: str, order: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    of_x, of_w, call = PRODUCTS[name]
    values = torch.randn(of_w[0], 2 * of_w[1], dtype=dtype)
    columns = values[:, ::2].t().contiguous().t()
    stored = {"rows": columns.contiguous(), "columns": columns, "gaps": values[:, ::2]}
    x, w = leaf(*of_x, dtype=dtype), stored[order].detach().requires_grad_()
    b = leaf(5 if of_w[0] > 1 else 1, dtype=dtype)
    out = call(x.tanh(), w, b)
    nodes, _ = find_branch_nodes([out], [w, b])
    ((node, (edges, own, product)),) = [(n, branch) for n, branch in nodes.items() if branch.product is not None]
    assert product is not None and own[product.factor] is w
    ends: list[Any] = edges
    (arrived,) = torch.autograd.grad(out, ends, torch.randn_like(out), retain_graph=True)
    expected = torch.autograd.grad(edges, own, [arrived], retain_graph=True)
    with torch.no_grad():
        found = differentiate_product(product, node, arrived, own)
    assert found is not None and len(found) == len(own)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None and not ours.requires_grad
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride() and ours.dtype == theirs.dtype


OTHERS: dict[str, Call] = {
    "no product": lambda x, w, b: x * b,
    "a weight that is computed": lambda x, w, b: F.linear(x, w * 2),
    "the bias is a matrix": lambda x, w, b: torch.addmm(w, x, x),
    "the weight comes first": lambda x, w, b: w @ x,
    "in batches": lambda x, w, b: torch.bmm(x[None], w[None]),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_nodes_are_no_products(name: str) -> None:
    nodes, _ = find_branch_nodes([OTHERS[name](leaf(3, 3).tanh(), w := leaf(3, 3), b := leaf(3))], [w, b])
    assert nodes and [branch.product for branch in nodes.values()] == [None] * len(nodes)


def test_a_bias_that_is_not_trained_gets_none() -> None:
    x, w, b = leaf(2, 3), leaf(4, 3), torch.randn(4)
    ((node, (_, own, product)),) = find_branch_nodes([F.linear(x.tanh(), w, b)], [w])[0].items()
    assert product is not None and product.bias is None
    with torch.no_grad():
        found = differentiate_product(product, node, torch.ones(2, 4), own)
    assert found is not None and found[0] is not None and found[0].shape == (4, 3)


def test_what_autograd_has_to_do_itself() -> None:
    def ask(x: Tensor, out: Tensor, weights: list[Tensor], gradient: Tensor) -> Any:
        ((node, (_, own, product)),) = find_branch_nodes([out], weights)[0].items()
        assert product is not None
        with torch.no_grad():
            return differentiate_product(product, node, gradient, own)

    x, w, b = leaf(2, 3), leaf(3, 4), leaf(4)
    ones = torch.ones(2, 4)
    assert ask(x, torch.addmm(b, x.tanh(), w), [w, b], ones) is not None
    assert ask(x, torch.addmm(b, x.tanh(), w, alpha=2), [w, b], ones) is None
    assert ask(x, torch.addmm(b, x.tanh(), w, beta=0.5), [w, b], ones) is None
    assert ask(x, x.tanh() @ w, [w], ones.double()) is None
    assert ask(x, x.tanh() @ w, [w], ones.to_sparse()) is None
    with torch.autograd.set_detect_anomaly(True):
        assert ask(x, x.tanh() @ w, [w], ones) is None
    z, c = leaf(2, 3, dtype=torch.complex64), leaf(3, 4, dtype=torch.complex64)
    assert ask(z, z.tanh() @ c, [c], ones.to(torch.complex64)) is None


def test_a_factor_that_has_changed_is_refused() -> None:
    x, w = leaf(2, 3), leaf(3, 4)
    h = x.tanh()
    ((node, (_, own, product)),) = find_branch_nodes([h @ w], [w])[0].items()
    assert product is not None and find_product(node, [w]) == product
    with torch.no_grad():
        h += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            differentiate_product(product, node, torch.ones(2, 4), own)
