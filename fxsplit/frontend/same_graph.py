"""Whether two captures are the same graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxsplit.frontend.check.values import list_fetched


def same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Return whether two captures of one model are the same operations on the same modules and constants."""
    return _skeleton(a) == _skeleton(b) and all(
        one is other or (isinstance(one, Tensor) and isinstance(other, Tensor) and _identical(one, other))
        for one, other in zip(list_fetched(a).values(), list_fetched(b).values(), strict=True)
    )


def _identical(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same but for where they are kept."""
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b))


def _skeleton(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return every node without what is unique to one graph."""
    return [(n.op, n.name, n.target, repr(n.args), repr(n.kwargs)) for n in gm.graph.nodes]
