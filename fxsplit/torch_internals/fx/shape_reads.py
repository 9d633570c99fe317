"""Which nodes of a graph read the shape of a tensor, or its dtype, and no values: all tensors alike give the same."""

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
    """Return whether what a node makes of a tensor follows from the tensor's shape and dtype."""
    if node.op == "call_method":
        return node.target in METHODS
    # An attribute of a tensor may hold values, as `.data` and `.grad` do.
    if node.target is getattr:
        return node.args[1] in ATTRIBUTES
    return node.op == "call_function" and node.target in OPERATORS
