"""Minimum cuts of a graph with too many ideals: what a cut must send at least, and an order with light cuts.

Split the work into levels, such as 0 to 1 ms, 1 to 2 ms and so on. Take an ideal whose work lies in a level. If all
blocks but v and what needs v have less work than the level, the ideal holds v. If v and what v needs have more work
than the level, the ideal does not hold v. Among all ideals with the blocks that must be inside, and without those that
must not, the one that sends the fewest bytes is a minimum cut of a flow network. So no ideal of the level sends less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from math import inf
from operator import or_

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.lattice.antichains import Levels
from fxsplit.ir.facts.lattice.blocks import Blocks
from fxsplit.system.imports import import_whole

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
LEVELS = 128
"""Levels of work: one minimum cut each."""
MOST_ANCESTORS = 20_000
"""More blocks than these are too many for a set of ancestors each, which take memory in the square of the blocks."""
FINE, ENDLESS = 2**30, 2**31 - 1
"""All bytes together, and what may not be cut, in the units of a capacity: scipy takes 32-bit whole numbers."""
CALLER, SINK = -1, -2
"""Stand for who makes the inputs of the model, and who reads its outputs."""


def find_cut_levels(costs: Costs, blocks: Blocks, count: int = LEVELS) -> tuple[Levels, list[int]]:
    """Return levels with the fewest bytes that a cut in each sends, and a topological order that follows light cuts."""
    times = {n.name: n.forward_ms + n.backward_ms for n in costs.nodes}
    work = np.array([sum(times[name] for name in names) for names in blocks.members], np.float64)
    n, total = len(blocks), float(work.sum())
    # What a block needs is before it in the order, and what needs it is behind.
    needed = _reached(work, blocks.before, range(n))
    needing = _reached(work, blocks.after, reversed(range(n)))
    edges = np.linspace(0.0, total, count + 1)
    # Wider by a little, since sums in another order differ in their last digits.
    low, high = edges[:-1] - 1e-9 * total, edges[1:] + 1e-9 * total
    network = _Network.of(costs, blocks)
    least = np.full(count, inf)
    rank = np.full(n, count)
    for level in range(count):
        inside, outside = total - needing < low[level], needed > high[level]
        # A block that must be inside and outside means that no ideal has just so much work.
        if not (inside & outside).any():
            least[level], side = network.cut(inside, outside)
            rank[side] = np.minimum(rank[side], level)
    # Blocks that light cuts of low levels hold come first.
    return Levels(low, high, least), sorted(range(n), key=lambda b: (rank[b], b))


def _reached(work: Floats, near: Sequence[Sequence[int]], order: Iterable[int]) -> Floats:
    """Return, for each block, the work of all blocks that it reaches over `near`, itself included, in ms.

    With very many blocks the result is less than that: the work along the heaviest path alone.
    """
    n = work.size
    sums = np.zeros(n)
    sets = [0] * n
    for b in order:
        if n > MOST_ANCESTORS:
            sums[b] = work[b] + max((sums[a] for a in near[b]), default=0.0)
            continue
        # A set of blocks as the bits of a number: unions are fast, and numpy sums the work of the bits.
        sets[b] = reduce(or_, (sets[a] for a in near[b]), 1 << b)
        bits = np.frombuffer(sets[b].to_bytes(-(-n // 8), "little"), np.uint8)
        sums[b] = work @ np.unpackbits(bits, count=n, bitorder="little")
    return sums


@dataclass(eq=False)
class _Network:
    """A flow network in which the source sides of finite cuts are ideals, and a cut costs what is live across it.

    A cut pays the capacity of an arc, in bytes, if the arc's tail lies on the source side and its head does not. An arc
    of infinite capacity leads from each block to those that it needs, so that a source side is an ideal. Each value has
    a vertex of its own. An arc of the value's bytes leads to it from the maker, and infinite arcs lead on to the
    readers: so the value is paid for once, if its maker lies before the cut and some reader behind it. `always` is how
    many bytes are live across every cut.
    """

    blocks: int
    arcs: list[tuple[int, int, float]] = field(default_factory=list)
    vertices: int = 0
    always: float = 0.0

    def __post_init__(self) -> None:
        self.vertices = self.blocks + 2

    @classmethod
    def of(cls, costs: Costs, blocks: Blocks) -> _Network:
        """Return the network of a graph."""
        net = cls(len(blocks))
        for b, before in enumerate(blocks.before):
            net.arcs += [(b, a, inf) for a in before]
        for name, _, _, readers, is_output in costs.values:
            sent = sum(costs.sent[name])
            maker = blocks.home.get(name, CALLER)
            away = sorted({blocks.home[r] for r in readers} - {maker})
            # An input that the model returns as it is crosses every cut.
            if is_output and maker == CALLER:
                net.always += sent
            elif is_output:
                net.arcs.append((maker, SINK, sent))
            elif away:
                # One vertex for the value: however many readers lie behind the cut, it is sent once.
                value = net.vertex()
                net.arcs.append((maker, value, sent))
                net.arcs += [(value, reader, inf) for reader in away]
        # An exchange has no direction: it is paid if its pins lie on both sides, whichever of them is on which.
        for exchange in costs.exchanges:
            some, all_ = net.vertex(), net.vertex()
            net.arcs.append((some, all_, exchange.output_bytes))
            for pin in {blocks.home[name] for name in exchange.nodes}:
                net.arcs += [(pin, some, inf), (all_, pin, inf)]
        return net

    def vertex(self) -> int:
        """Return a new vertex."""
        self.vertices += 1
        return self.vertices - 1

    @cached_property
    def capacities(self) -> tuple[Ints, Ints, Ints, float]:
        """The arcs as (tail, head, capacity), and how many bytes a unit of capacity is."""
        table = np.array(self.arcs, np.float64).reshape(-1, 3)
        total = float(table[np.isfinite(table[:, 2]), 2].sum())
        unit = total / FINE if total > 0 else 1.0
        # Rounded down, so that the flow stays a lower bound.
        whole = np.minimum(table[:, 2] / unit, ENDLESS).astype(np.int32)
        return table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), whole, unit

    def cut(self, inside: NDArray[np.bool_], outside: NDArray[np.bool_]) -> tuple[float, NDArray[np.int64]]:
        """Return the least bytes that a cut sends, and an ideal that does, with all `inside` and none `outside`."""
        # scipy takes a third of a second to load, and is seldom needed.
        import_whole(["scipy.sparse.csgraph"])
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        tail, head, capacity, unit = self.capacities
        source, sink = self.blocks, self.blocks + 1
        # What must be inside hangs on the source, what must not on the sink, by arcs that nothing cuts.
        held, left = np.flatnonzero(inside), np.flatnonzero(outside)
        tail = np.concatenate([np.where(tail == CALLER, source, tail), np.full(held.size, source), left])
        head = np.concatenate([np.where(head == SINK, sink, head), held, np.full(left.size, sink)])
        capacity = np.concatenate([capacity, np.full(held.size + left.size, ENDLESS, np.int32)])
        network = csr_array((capacity, (tail, head)), shape=(self.vertices, self.vertices))
        flow = maximum_flow(network, source, sink)
        # What the source still reaches over arcs with capacity left is the source side of a minimum cut.
        residual = network.astype(np.int64) - flow.flow.astype(np.int64)
        residual.data = (residual.data > 0).astype(np.int8)
        residual.eliminate_zeros()
        side = breadth_first_order(residual, source, return_predecessors=False)
        return self.always + flow.flow_value * unit, side[side < self.blocks]
