"""Compute the weight gradient of a linear layer from its autograd node alone, as autograd does, without its engine.

A call of the engine searches the graph behind the node for the weight, and so all earlier layers, although the gradient
takes but two operators: for `x @ w.t() + b` and the gradient `g` that arrived, `g.t() @ x`, and the sum of `g` over all
rows. In a weight-gradient backward with a call for each layer the searches took more than half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Product(NamedTuple):
    """How a node is a product with the weights that it leads to.

    factor, bias: which of the weights is the second factor, and which is added (None: none of them).
    transposed: whether the second factor is the weight's transpose, as in nn.Linear.
    by_columns: whether the second factor lies in memory column by column, as in nn.Linear.
    saved: the name of the node's attribute for the first factor.
    scales: whether the node may multiply its parts by numbers.
    """

    factor: int
    bias: int | None
    transposed: bool
    by_columns: bool
    saved: str
    scales: bool


def find_product(node: Any, weights: Sequence[Tensor]) -> Product | None:
    """Return how a node is a product with the weights that it leads to; None where it is none, or more than that."""
    kinds = {"AddmmBackward0": ("_saved_mat1", 2), "MmBackward0": ("_saved_self", 1)}
    saved, edge = kinds.get(node.name(), ("", 0))
    # AMD's kernels for half precision ask whether a backward runs.
    if not saved or not hasattr(type(node), saved) or torch.version.hip is not None:
        return None
    numbers = {id(weight): i for i, weight in enumerate(weights)}
    behind = node.next_functions[edge][0]
    transposed = behind is not None and behind.name() == "TBackward0"
    if transposed:
        behind = behind.next_functions[0][0]
    factor = numbers.pop(id(getattr(behind, "variable", None)), None)
    added = node.next_functions[0][0] if edge == 2 else None
    bias = numbers.pop(id(getattr(added, "variable", None)), None)
    if factor is None or numbers or (bias is not None and weights[bias].ndim != 1):
        return None
    if weights[factor].layout is not torch.strided:
        return None
    shape, strides = weights[factor].shape, weights[factor].stride()
    if transposed:
        shape, strides = shape[::-1], strides[::-1]
    return Product(factor, bias, transposed, strides == (1, shape[0]), saved, edge == 2)


def differentiate_product(
    product: Product, node: Any, gradient: Tensor, weights: Sequence[Tensor]
) -> list[Tensor | None] | None:
    """Return the gradients of the weights behind a product's node, to the bit as autograd computes them.

    gradient: what arrived at the node, [rows, columns]. To be called under no_grad. Returns None where autograd has to
    do it itself: for sparse or complex numbers, several dtypes, factors that are scaled, and where anomalies are to be
    detected.
    """
    if product.scales and (node._saved_alpha != 1 or node._saved_beta != 1):
        return None
    x, dtype = getattr(node, product.saved), weights[product.factor].dtype
    if not (type(gradient) is type(x) is Tensor and gradient.dtype is x.dtype is dtype and dtype.is_floating_point):
        return None
    if not gradient.layout is x.layout is torch.strided or torch.is_anomaly_enabled():
        return None
    found: list[Tensor | None] = [None] * len(weights)
    # Of the two ways to compute it, autograd takes the one whose result lies in memory as the second factor does.
    if product.by_columns:
        of_factor = gradient.t().mm(x)
        found[product.factor] = of_factor if product.transposed else of_factor.t()
    else:
        of_factor = x.t().mm(gradient)
        found[product.factor] = of_factor.t() if product.transposed else of_factor
    if product.bias is not None:
        found[product.bias] = gradient.sum(0)
    return found
