"""Whether two captures of a model, one in training and one in evaluation, are the same graph and can share stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxsplit.frontend.check.values import list_fetched


def same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Return whether two captures of one model are the same operations on the same modules and constants.

    Weights must be the same objects. A constant may be another tensor of the same values: each capture makes its own.
    """
    return _list_nodes(a) == _list_nodes(b) and all(
        one is other or (isinstance(one, Tensor) and isinstance(other, Tensor) and _has_equal_values(one, other))
        for one, other in zip(list_fetched(a).values(), list_fetched(b).values(), strict=True)
    )


def _has_equal_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same, except for where in memory they are."""
    # torch.equal raises for tensors on two devices, and compares dtypes loosely.
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))


def _list_nodes(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return all that a graph says of each node, without the nodes themselves: those are of one graph alone."""
    return [(n.op, n.name, n.target, repr(n.args), repr(n.kwargs)) for n in gm.graph.nodes]
