"""Stand-ins: replace a dtype or a shape that a count reads from a tensor which was computed with weights.

`mask.to(loss.dtype).sum()` counts entries of the mask. The loss is computed with weights, but the count needs only its
dtype, which is known before anything runs. So the dtype replaces the loss. `logits.size(1)` is replaced by the size of
an input that has the same length there, so that the count is also right for inputs of other lengths. If there is no
such input, the number itself replaces it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxsplit.ir.facts.costs.compress import parse_tensor

FILLED = {"ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0}
"""Functions that make a tensor of another tensor's shape, by name, and the number that they fill it with."""
SHAPED = {"expand_as", "view_as", "reshape_as", "expand", "view", "reshape", "broadcast_to"}
"""Functions that give a tensor another shape, by name. A count grows by the same factor in all microbatches."""
CONVERTED = {"to", "type_as"}
"""Functions that may convert a tensor to the dtype of another tensor, by name."""
KNOWN = {"torch", "_operator", "builtins"}
"""Packages whose functions are recognised by name."""


class ValueReads:
    """Tells, for the nodes of a graph, from which other nodes their values are computed.

    A node that reads only the dtype or shape of another node does not depend on the other node's values.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._using: dict[fx.Node, bool] = {}

    def list_ancestors(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the given nodes, and all nodes from which their values are computed."""
        nodes = list(nodes)
        for node in nodes:
            self.uses_weights(node)
        return list_ancestors(nodes, self._list_read)

    def uses_weights(self, node: fx.Node) -> bool:
        """Return whether the values of a node are computed with parameters, or by a module, which may have some."""
        # A loop, not a recursion: a graph may be deeper than Python's stack.
        waiting = [node]
        while waiting:
            last = waiting[-1]
            unknown = [n for n in last.all_input_nodes if n not in self._using]
            if last in self._using:
                waiting.pop()
            elif is_weight(self._gm, last):
                self._using[last] = True
            elif unknown:
                waiting += unknown
            else:
                self._using[last] = any(self._using[n] for n in self._list_read(last))
        return self._using[node]

    def copy(self, graph: fx.Graph, node: fx.Node, copied: Mapping[fx.Node, Any]) -> Any:
        """Copy a node to another graph. Returns the copy, or the stand-in for the node.

        copied: the copies of the nodes before it.
        """
        read, name, given = self._list_read(node), read_name(node), node.all_input_nodes
        if len(read) == len(given):
            return graph.node_copy(node, copied.__getitem__)
        if _reads_shape(node):
            return _find_size(graph, node, copied)
        if name == "getattr":
            return _find_dtype(given[0])
        if name in FILLED:
            return graph.call_function(torch.full, ((), FILLED[name]), {"dtype": _find_dtype(node)})
        if name in SHAPED:
            return copied[given[0]]
        return graph.call_method("to", (copied[given[0]], _find_dtype(node)))

    def _list_read(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the nodes whose values a node reads. Call `uses_weights` for all its inputs first."""
        given, name = node.all_input_nodes, read_name(node)
        if name == "getattr" and node.args[1] == "dtype":
            return []
        if not any(self._using[n] for n in given):
            return given
        if name in FILLED or _reads_shape(node):
            return []
        return given[:1] if name in SHAPED | CONVERTED and given[0] is node.args[0] else given


def read_name(node: fx.Node) -> str:
    """Return the name of the function of torch or Python that a node calls, such as "add". Empty for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    module = getattr(node.target, "__module__", None) or "torch"
    known = node.op == "call_function" and module.split(".")[0] in KNOWN
    return str(getattr(node.target, "__name__", "")) if known else ""


def read_dtype(node: fx.Node) -> str:
    """Return the dtype of a node, such as "int64", as a check has written it into the node; empty if it has not."""
    return str(node.meta.get("fxsplit_shape", "")).split("[")[0]


def is_weight(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node fetches a parameter, or calls a module, which may have parameters."""
    if node.op == "get_attr":
        return isinstance(operator.attrgetter(str(node.target))(gm), nn.Parameter)
    return node.op == "call_module"


def list_ancestors(
    nodes: Iterable[fx.Node], list_read: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes
) -> set[fx.Node]:
    """Return the given nodes, and all nodes that they are computed from.

    list_read: returns the nodes that a node reads (default: all its inputs).
    """
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += list_read(node)
    return found


def _reads_shape(node: fx.Node) -> bool:
    """Return whether a node reads the shape of a tensor, or one size of it, and the shape is known."""
    name = read_name(node)
    is_read = name in ("size", "sym_size") or (name == "getattr" and node.args[1] == "shape")
    return is_read and bool(_list_sizes(node.all_input_nodes[0]))


def _find_size(graph: fx.Graph, node: fx.Node, copied: Mapping[fx.Node, Any]) -> Any:
    """Return the stand-in for a shape, or for one size, that a node reads.

    It may be a new node that reads an input's size.
    """
    sizes = _list_sizes(node.all_input_nodes[0])
    inputs = [n for n in copied if n.op == "placeholder"]

    def read(dim: int) -> Any:
        alike = (n for n in inputs if _list_sizes(n)[dim : dim + 1] == [sizes[dim]])
        place = next(alike, None)
        return sizes[dim] if place is None else graph.call_method("size", (copied[place], dim))

    dim: Any = None if read_name(node) == "getattr" else next(iter([*node.args[1:], *node.kwargs.values()]), None)
    return tuple(map(read, range(len(sizes)))) if dim is None else read(dim % len(sizes))


def _list_sizes(node: fx.Node) -> list[int]:
    """Return the shape of a node, such as [8, 64], as a check has written it into the node; empty if unknown."""
    found = parse_tensor(str(node.meta.get("fxsplit_shape", "")))
    return [] if found is None else found[1]


def _find_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node. If it is unknown, return float64, which can hold any count."""
    found = getattr(torch, read_dtype(node), None)
    return found if isinstance(found, torch.dtype) else torch.float64
