"""Find nodes that read only the shape or dtype of a tensor. Their result does not depend on the tensor's values."""

from __future__ import annotations

import torch
from torch import fx

METHODS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point"})
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "itemsize"})
OPERATORS = frozenset(
    {
        len,
        torch.numel,
        torch.is_floating_point,
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_size.default,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.size.default,
        torch.ops.aten.size.int,
    }
)


def reads_shape(node: fx.Node) -> bool:
    """Return whether a node's result depends only on the shape and dtype of its tensor."""
    if node.op == "call_method":
        return node.target in METHODS
    # Other attributes of a tensor may hold values, as `.data` and `.grad` do.
    if node.target is getattr:
        return node.args[1] in ATTRIBUTES
    return node.op == "call_function" and node.target in OPERATORS
