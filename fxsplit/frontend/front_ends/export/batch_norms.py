"""Find torch's own batch norms in an exported program, which has split each of them into several nodes.

A call of `self.norm`, a BatchNorm1d in training mode, gives two nodes: `aten.add_(norm.num_batches_tracked, 1)`, which
counts the batch, and `aten.batch_norm(x, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, ...)`. If
the graph calls the module instead, the update of its statistics can be deferred, or made by replicas in the order of
microbatches.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn

from fxsplit.frontend.front_ends.export.blocks import find_body, is_block
from fxsplit.torch_internals.nn.batch_norm import is_batch_norm

aten = torch.ops.aten


def find_batch_norms(program: fx.GraphModule, model: nn.Module) -> dict[fx.Node, str | None]:
    """Return the nodes that belong to torch's own batch norms, each with the path of the module it calls.

    The path is None for a node that only counts batches.
    A batch norm with hooks, or with a forward() of its own, does more than its two nodes and is left as it is.
    """
    found: dict[str, dict[fx.Node, str | None]] = defaultdict(dict)  # by path, to find out at the end which to keep
    for node in program.graph.nodes:
        if node.target is aten.batch_norm.default and isinstance(node.args[3], fx.Node):
            path = str(node.args[3].target).removesuffix(".running_mean")
            found[path][node] = path
        elif node.target is aten.add_.Tensor:
            path = str(find_counter(program, node).target)
            if path.endswith(".num_batches_tracked"):
                found[path.removesuffix(".num_batches_tracked")][node] = None
    modules = dict(model.named_modules(remove_duplicate=False))
    # forward() may itself count on the buffer of a batch norm that it does not call.
    plain = [nodes for path, nodes in found.items() if any(nodes.values()) and _is_plain_batch_norm(modules.get(path))]
    return {node: path for nodes in plain for node, path in nodes.items()}


def find_counter(program: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return the node that fetches the buffer on which `node`, a write in place, counts.

    The second call of a layer counts on the result of the first call, which a block may have returned:

        counter = get_attr norm.num_batches_tracked;  add_ = aten.add_(counter, 1);  add__1 = aten.add_(add_, 1)
    """
    while True:
        source: Any = node.args[0] if node.args else None
        if node.target is aten.add_.Tensor and isinstance(source, fx.Node):
            node = source
        elif node.target is operator.getitem and is_block(source):
            # Look through the block: from its result, inside its body, to the argument that the body counts on.
            position, body = find_body(program, source)
            result: Any = body.graph.output_node().args[0][node.args[1]]  # type: ignore[index]
            placeholders = body.graph.find_nodes(op="placeholder")
            counter = find_counter(body, result) if isinstance(result, fx.Node) else result
            if counter not in placeholders:
                return node
            node = source.args[position + 1 + placeholders.index(counter)]
        else:
            return node


def _is_plain_batch_norm(module: Any) -> bool:
    """Return whether a module is torch's own batch norm without hooks, so that its call equals the exported nodes."""
    # SyncBatchNorm and subclasses have a forward() of their own.
    if not is_batch_norm(module) or type(module).forward is not nn.BatchNorm1d.forward:
        return False
    return not any(held for key, held in module.__dict__.items() if "_hooks" in key)
