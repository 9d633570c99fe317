"""Blocks: sets of nodes that no cut may separate, and the graph of these blocks, which the planner cuts.

Most blocks are single nodes. Two nodes that share a parameter are in one block, with all nodes between them:

    a --> b --> c        a and c share a weight, so {a, b, c} is one block

A stage with a and c but without b would have to wait for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.arrays import Ints
from fxsplit.system.imports import import_whole


@dataclass(frozen=True, eq=False)
class Blocks:
    """A directed graph of blocks, numbered in a topological order.

    `members[b]` are the nodes of block b in graph order; `before[b]` and `after[b]` are its neighbours, ascending.
    """

    members: tuple[tuple[str, ...], ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, costs: Costs) -> Blocks:
        """Return the smallest blocks that `costs` allow.

        Each set of nodes that must stay together is made a cycle of the graph; the blocks are then the strongly
        connected components. A node between two nodes of a set is on a cycle too. So each block is *convex*: no path
        leaves a block and comes back.
        """
        # The position of each node in the graph, which is a topological order.
        position = {n.name: i for i, n in enumerate(costs.nodes)}
        arrows = {(position[i], position[n.name]) for n in costs.nodes for i in n.inputs if i in position}
        arrows |= {(position[a], position[b]) for a, b in costs.ordered}
        components = _components(arrows, [[position[n] for n in names] for names in costs.together], len(position))
        return cls._of(components, arrows, costs)

    @classmethod
    def _of(cls, components: Sequence[Sequence[int]], arrows: set[tuple[int, int]], costs: Costs) -> Blocks:
        """Return the blocks for convex sets of nodes, joined by `arrows`. Sets and arrows give nodes by position."""
        home = {node: b for b, component in enumerate(components) for node in component}
        edges = {(home[a], home[b]) for a, b in arrows if home[a] != home[b]}
        order = _chain_order(len(components), edges)
        # Renumber by the order, so that the number of a block is its position.
        rank = {block: i for i, block in enumerate(order)}
        before: list[set[int]] = [set() for _ in components]
        after: list[set[int]] = [set() for _ in components]
        for a, b in edges:
            before[rank[b]].add(rank[a])
            after[rank[a]].add(rank[b])
        names_of = [n.name for n in costs.nodes]
        return cls(
            tuple(tuple(names_of[i] for i in components[b]) for b in order),
            tuple(tuple(sorted(s)) for s in before),
            tuple(tuple(sorted(s)) for s in after),
        )

    def joined(self, groups: Iterable[Sequence[int]], costs: Costs) -> Blocks:
        """Return the blocks after joining each group into one block.

        A group lists the numbers of its blocks. It must be convex: no path may leave it and come back.
        """
        position = {n.name: i for i, n in enumerate(costs.nodes)}
        sets = [sorted(position[name] for b in group for name in self.members[b]) for group in groups]
        # Any node can represent its block, since the arrows are between blocks.
        first = [position[names[0]] for names in self.members]
        arrows = {(first[a], first[b]) for a, after in enumerate(self.after) for b in after}
        return self._of(sorted(sets), arrows, costs)

    def reordered(self, order: Sequence[int]) -> Blocks:
        """Return the same blocks numbered in another topological order."""
        number = {b: i for i, b in enumerate(order)}

        def renamed(near: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(sorted(number[a] for a in near[b])) for b in order)

        return Blocks(tuple(self.members[b] for b in order), renamed(self.before), renamed(self.after))

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def home(self) -> dict[str, int]:
        """The block of each node."""
        return {name: b for b, names in enumerate(self.members) for name in names}


def build_csr(rows: Iterable[Iterable[int]]) -> tuple[Ints, Ints]:
    """Return a list of lists in CSR form: (pointer, items), both int32.

    List i is `items[pointer[i] : pointer[i + 1]]`.
    """
    lists = [list(row) for row in rows]
    pointer = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(row) for row in lists], out=pointer[1:])
    return pointer, np.array([item for row in lists for item in row], np.int32)


def _components(arrows: set[tuple[int, int]], together: list[list[int]], count: int) -> list[list[int]]:
    """Return the strongly connected components of a DAG in which the nodes of each set of `together` form a cycle."""
    if not together:
        return [[node] for node in range(count)]
    # networkx takes 0.2 s to load, which a profile without constraints need not wait for.
    import_whole(["networkx"])
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(arrows)
    for nodes in together:
        nx.add_cycle(graph, nodes)
    return sorted(sorted(c) for c in nx.strongly_connected_components(graph))


def _chain_order(count: int, edges: set[tuple[int, int]]) -> list[int]:
    """Return a topological order that follows each chain to its end before it begins the next.

    A prefix of this order has few unfinished branches, so few values cross a cut after it.
    """
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    # Sorted, since the order of a set differs between processes and plans must not.
    for a, b in sorted(edges):
        after[a].append(b)
        waiting[b] += 1
    # A stack with the first block on top: a block that becomes ready is taken next.
    stack = [b for b in reversed(range(count)) if waiting[b] == 0]
    order = []
    while stack:
        block = stack.pop()
        order.append(block)
        for follower in reversed(after[block]):
            waiting[follower] -= 1
            if waiting[follower] == 0:
                stack.append(follower)
    return order
