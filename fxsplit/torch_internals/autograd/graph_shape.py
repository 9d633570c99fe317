"""Know an autograd graph again: whether it has the shape of an earlier one, node by node.

A training step makes the same graph for each microbatch, and what follows from the graph's shape need be found out only
once. A shape is all that a search through a graph sees: the type of each node, its edges, and which of the leaves each
end of the graph is. It is compared as a whole: modules may choose their operators by the values of a microbatch, so no
part of a graph says what the rest is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

Edges = Sequence[tuple[Any, int]]
"""Edges out of a node: the node that each goes to, None for an argument without gradient, and the output used there."""


class GraphShape:
    """The shape of the graph behind some roots, with the leaves that matter as numbers.

    numbers: the number of each leaf that matters, by its id. `positions`, which is empty at first, gets the position of
    each node in the list that `match` returns for any graph of this shape. None comes first, then a search by breadth.
    """

    def __init__(self, roots: Sequence[Tensor], numbers: Mapping[int, int], positions: dict[Any, int]) -> None:
        positions[None] = 0
        nodes: list[Any] = [None]
        rows: list[Edges] = []
        # For each row of edges, which of them lead to nodes that no earlier edge leads to.
        self._fresh: list[tuple[int, ...]] = []
        while len(rows) < len(nodes):
            # The edges of the roots are in the place of those of None.
            edges = nodes[len(rows)].next_functions if rows else _list_edges(roots)
            fresh = []
            for i, (node, _) in enumerate(edges):
                if node not in positions:
                    positions[node] = len(nodes)
                    nodes.append(node)
                    fresh.append(i)
            rows.append(edges)
            self._fresh.append(tuple(fresh))
        flat = list(chain.from_iterable(rows))
        self._lengths = list(map(len, rows))
        self._outputs = [output for _, output in flat]
        # Twice None at the end: a getter of one position returns no tuple.
        self._targets = itemgetter(*(positions[node] for node, _ in flat), 0, 0)
        self._types = list(map(type, nodes))
        self._leaf_roots = _number_leaf_roots(roots, numbers)
        # A leaf's node, AccumulateGrad, is the only kind that names its tensor.
        self._leaves = [i for i, node in enumerate(nodes) if hasattr(node, "variable")]
        self._numbers = [numbers.get(id(nodes[i].variable)) for i in self._leaves]
        # Nodes of extensions in C++ have one type in Python, and other names. Leaves' nodes have a type of their own.
        others = [(i, nodes[i]) for i in range(1, len(nodes)) if i not in self._leaves]
        self._names = [(i, node.name()) for i, node in others if node.name() != type(node).__name__]

    def match(self, roots: Sequence[Tensor], numbers: Mapping[int, int]) -> list[Any] | None:
        """Return the nodes of the graph behind `roots`, or None where it has another shape."""
        nodes: list[Any] = [None]
        rows: list[Edges] = [_list_edges(roots)]
        add_node, add_row = nodes.append, rows.append
        try:
            for i in self._fresh[0]:
                add_node(rows[0][i][0])
            for position in range(1, len(self._fresh)):
                edges = nodes[position].next_functions
                add_row(edges)
                for i in self._fresh[position]:
                    add_node(edges[i][0])
        # A node has fewer edges than the shape's, or there is none.
        except (AttributeError, IndexError):
            return None
        # Node, output, node, output and so on, without a step of Python for each edge.
        flat = list(chain.from_iterable(chain.from_iterable(rows)))
        same = (
            list(map(type, nodes)) == self._types
            and list(map(len, rows)) == self._lengths
            and flat[1::2] == self._outputs
            and (*flat[::2], None, None) == self._targets(nodes)
            # What was taken for a new node must not be one that was there.
            and len(set(nodes)) == len(nodes)
            and _number_leaf_roots(roots, numbers) == self._leaf_roots
            and [numbers.get(id(nodes[i].variable)) for i in self._leaves] == self._numbers
            and all(nodes[i].name() == name for i, name in self._names)
        )
        return nodes if same else None


def _list_edges(roots: Sequence[Tensor]) -> Edges:
    """Return the edges that lead into a graph; a root that is a leaf has no node."""
    return [(root.grad_fn, root.output_nr) for root in roots]


def _number_leaf_roots(roots: Sequence[Tensor], numbers: Mapping[int, int]) -> list[int | None]:
    """Return the numbers of the roots that are leaves themselves, None for each other root or leaf."""
    return [numbers.get(id(root)) if root.grad_fn is None else None for root in roots]
