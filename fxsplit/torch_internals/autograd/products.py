"""Compute the weight gradient of a linear layer from its autograd node, without autograd's engine.

A call of the engine searches the graph from the node towards the weight, through all earlier layers. The gradient
itself takes only two operators: for `x @ w.t() + b` and an incoming gradient `g`, these are `g.t() @ x` and the sum of
`g` over its rows. In a weight-gradient backward with one call per layer, the searches took more than half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Product(NamedTuple):
    """How an autograd node has multiplied its input by a weight.

    factor, bias: the indices of the weight that is the second factor, and of the weight that is added (None: no bias).
    transposed: whether the second factor is the transposed weight, as in nn.Linear.
    by_columns: whether the second factor is column-major in memory, as in nn.Linear.
    saved: the node's attribute that holds the first factor.
    scales: whether the node may scale its operands (alpha and beta).
    """

    factor: int
    bias: int | None
    transposed: bool
    by_columns: bool
    saved: str
    scales: bool


def find_product(node: Any, weights: Sequence[Tensor]) -> Product | None:
    """Return how a node multiplies by the given weights, or None if it does anything else."""
    kinds = {"AddmmBackward0": ("_saved_mat1", 2), "MmBackward0": ("_saved_self", 1)}
    saved, edge = kinds.get(node.name(), ("", 0))
    # AMD's half-precision kernels behave differently inside a backward.
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
    """Return the gradients of the weights of a product's node, equal to autograd's bit by bit.

    gradient: the gradient that arrived at the node, [rows, columns]. Call this under no_grad.
    Returns None if autograd must compute the gradients: for sparse or complex numbers, mixed dtypes, scaled operands,
    and in anomaly mode.
    """
    if product.scales and (node._saved_alpha != 1 or node._saved_beta != 1):
        return None
    x, dtype = getattr(node, product.saved), weights[product.factor].dtype
    if not (type(gradient) is type(x) is Tensor and gradient.dtype is x.dtype is dtype and dtype.is_floating_point):
        return None
    if not gradient.layout is x.layout is torch.strided or torch.is_anomaly_enabled():
        return None
    found: list[Tensor | None] = [None] * len(weights)
    # As autograd does, compute the gradient in the memory order of the second factor.
    if product.by_columns:
        of_factor = gradient.t().mm(x)
        found[product.factor] = of_factor if product.transposed else of_factor.t()
    else:
        of_factor = x.t().mm(gradient)
        found[product.factor] = of_factor.t() if product.transposed else of_factor
    if product.bias is not None:
        found[product.bias] = gradient.sum(0)
    return found
