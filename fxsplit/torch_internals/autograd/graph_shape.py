"""Recognise an autograd graph that has the same shape as an earlier graph, node by node.

A training step builds the same graph for each microbatch, so results that depend only on the shape of the graph are
computed once. The *shape* is all that a search through the graph sees: the type of each node, its edges, and the leaf
at each end. It is compared as a whole: a module may choose its operators by the values of a microbatch, so equality of
one part of a graph says nothing about the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

Edges = Sequence[tuple[Any, int]]
"""The edges of a node: for each, the next node (None for an argument without gradient) and the index of its output."""


class GraphShape:
    """The shape of the autograd graph that ends at some roots. Leaves are numbered.

    numbers: the number of each relevant leaf, by id.
    positions: an empty dict, which gets the position of each node in the list that `match` returns for a graph of this
        shape. None comes first, then the nodes in breadth-first order.
    """

    def __init__(self, roots: Sequence[Tensor], numbers: Mapping[int, int], positions: dict[Any, int]) -> None:
        positions[None] = 0
        nodes: list[Any] = [None]
        rows: list[Edges] = []
        # For each row of edges, the indices of edges to nodes not reached by earlier edges.
        self._fresh: list[tuple[int, ...]] = []
        while len(rows) < len(nodes):
            # The first row holds the edges of the roots, in the position of None.
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
        # Two extra Nones, since an itemgetter with one position returns no tuple.
        self._targets = itemgetter(*(positions[node] for node, _ in flat), 0, 0)
        self._types = list(map(type, nodes))
        self._leaf_roots = _number_leaf_roots(roots, numbers)
        # AccumulateGrad, a leaf's node, is the only node type with a `variable`.
        self._leaves = [i for i, node in enumerate(nodes) if hasattr(node, "variable")]
        self._numbers = [numbers.get(id(nodes[i].variable)) for i in self._leaves]
        # Nodes of C++ extensions share one Python type, so compare their names. The nodes of leaves have their own
        # type.
        others = [(i, nodes[i]) for i in range(1, len(nodes)) if i not in self._leaves]
        self._names = [(i, node.name()) for i, node in others if node.name() != type(node).__name__]

    def match(self, roots: Sequence[Tensor], numbers: Mapping[int, int]) -> list[Any] | None:
        """Return the nodes of the graph of `roots`, or None if it has another shape."""
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
        # A node is missing, or has fewer edges than in the shape.
        except (AttributeError, IndexError):
            return None
        # Node, output, node, output and so on, without a Python step per edge.
        flat = list(chain.from_iterable(chain.from_iterable(rows)))
        same = (
            list(map(type, nodes)) == self._types
            and list(map(len, rows)) == self._lengths
            and flat[1::2] == self._outputs
            and (*flat[::2], None, None) == self._targets(nodes)
            # A node that the shape has as new must not be one that appeared before.
            and len(set(nodes)) == len(nodes)
            and _number_leaf_roots(roots, numbers) == self._leaf_roots
            and [numbers.get(id(nodes[i].variable)) for i in self._leaves] == self._numbers
            and all(nodes[i].name() == name for i, name in self._names)
        )
        return nodes if same else None


def _list_edges(roots: Sequence[Tensor]) -> Edges:
    """Return the edges from the roots into the graph. A root that is a leaf has no node."""
    return [(root.grad_fn, root.output_nr) for root in roots]


def _number_leaf_roots(roots: Sequence[Tensor], numbers: Mapping[int, int]) -> list[int | None]:
    """Return the number of each root that is a leaf.

    The number is None for other roots, and for leaves without a number.
    """
    return [numbers.get(id(root)) if root.grad_fn is None else None for root in roots]
