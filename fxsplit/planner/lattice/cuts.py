"""Minimum cuts of a graph with too many ideals: lower bounds of the bytes over a cut, and an order with light cuts.

Split the total work into levels, such as 0 to 1 ms, 1 to 2 ms and so on, and take an ideal with its work in one level.
It must contain block v if all blocks except v and its descendants have less work than the level. It cannot contain v if
v and its ancestors have more work than the level. Among all ideals under these two conditions, the ideal that sends the
fewest bytes is a minimum cut of a flow network. So no ideal of the level sends less.
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
"""The number of work levels, each with one minimum cut."""
MOST_ANCESTORS = 20_000
"""Above this number of blocks, ancestor sets would take too much memory: it grows with the square of the blocks."""
FINE, ENDLESS = 2**30, 2**31 - 1
"""Capacities in scipy's 32-bit units: the sum of all bytes, and infinity."""
CALLER, SINK = -1, -2
"""Vertices for the caller of the model, which makes its inputs, and for the reader of its outputs."""


def find_cut_levels(costs: Costs, blocks: Blocks, count: int = LEVELS) -> tuple[Levels, list[int]]:
    """Return the levels with the fewest bytes over any cut in each, and a topological order along light cuts."""
    times = {n.name: n.forward_ms + n.backward_ms for n in costs.nodes}
    work = np.array([sum(times[name] for name in names) for names in blocks.members], np.float64)
    n, total = len(blocks), float(work.sum())
    # The work of each block with its ancestors, and with its descendants.
    needed = _reached(work, blocks.before, range(n))
    needing = _reached(work, blocks.after, reversed(range(n)))
    edges = np.linspace(0.0, total, count + 1)
    # Widen the levels slightly: sums in a different order differ in their last digits.
    low, high = edges[:-1] - 1e-9 * total, edges[1:] + 1e-9 * total
    network = _Network.of(costs, blocks)
    least = np.full(count, inf)
    rank = np.full(n, count)
    for level in range(count):
        inside, outside = total - needing < low[level], needed > high[level]
        # If a block would have to be both inside and outside, no ideal has an amount of work in this level.
        if not (inside & outside).any():
            least[level], side = network.cut(inside, outside)
            rank[side] = np.minimum(rank[side], level)
    # Order the blocks by the lowest level with a light cut that contains them.
    return Levels(low, high, least), sorted(range(n), key=lambda b: (rank[b], b))


def _reached(work: Floats, near: Sequence[Sequence[int]], order: Iterable[int]) -> Floats:
    """Return, for each block, the work in ms of the block and all blocks reachable over `near`.

    In a very large graph it returns a smaller number, the work along the heaviest path.
    """
    n = work.size
    sums = np.zeros(n)
    sets = [0] * n
    for b in order:
        if n > MOST_ANCESTORS:
            sums[b] = work[b] + max((sums[a] for a in near[b]), default=0.0)
            continue
        # Each set of blocks is the bits of an integer: unions are fast, and numpy sums the work of its bits.
        sets[b] = reduce(or_, (sets[a] for a in near[b]), 1 << b)
        bits = np.frombuffer(sets[b].to_bytes(-(-n // 8), "little"), np.uint8)
        sums[b] = work @ np.unpackbits(bits, count=n, bitorder="little")
    return sums


@dataclass(eq=False)
class _Network:
    """A flow network whose finite cuts correspond to ideals; the capacity of a cut is the bytes live across the ideal.

    A cut pays for an arc, in bytes, if the arc's tail is on the source side and its head on the sink side:

        maker --bytes--> value --inf--> reader 1      the value is paid once, if the maker is before the cut
                               --inf--> reader 2      and a reader after it
        block --inf--> predecessor                    the source side contains all predecessors: it is an ideal

    `always` is the number of bytes live across every cut.
    """

    blocks: int
    arcs: list[tuple[int, int, float]] = field(default_factory=list)
    vertices: int = 0
    always: float = 0.0

    def __post_init__(self) -> None:
        self.vertices = self.blocks + 2

    @classmethod
    def of(cls, costs: Costs, blocks: Blocks) -> _Network:
        """Build the flow network whose minimum cut is the ideal with the fewest live bytes."""
        net = cls(len(blocks))
        for b, before in enumerate(blocks.before):
            net.arcs += [(b, a, inf) for a in before]
        for name, _, _, readers, is_output in costs.values:
            sent = sum(costs.sent[name])
            maker = blocks.home.get(name, CALLER)
            away = sorted({blocks.home[r] for r in readers} - {maker})
            # An input that the model returns unchanged crosses every cut.
            if is_output and maker == CALLER:
                net.always += sent
            elif is_output:
                net.arcs.append((maker, SINK, sent))
            elif away:
                # Give the value its own vertex: it is sent once, for any number of readers after the cut.
                value = net.vertex()
                net.arcs.append((maker, value, sent))
                net.arcs += [(value, reader, inf) for reader in away]
        # An exchange has no direction. It is paid if a cut separates its pins, whichever side they are on.
        for exchange in costs.exchanges:
            some, all_ = net.vertex(), net.vertex()
            net.arcs.append((some, all_, exchange.output_bytes))
            for pin in {blocks.home[name] for name in exchange.nodes}:
                net.arcs += [(pin, some, inf), (all_, pin, inf)]
        return net

    def vertex(self) -> int:
        """Add a vertex and return its number."""
        self.vertices += 1
        return self.vertices - 1

    @cached_property
    def capacities(self) -> tuple[Ints, Ints, Ints, float]:
        """The arcs as (tail, head, capacity), and the bytes of one unit of capacity."""
        table = np.array(self.arcs, np.float64).reshape(-1, 3)
        total = float(table[np.isfinite(table[:, 2]), 2].sum())
        unit = total / FINE if total > 0 else 1.0
        # Round down, so that the flow stays a lower bound.
        whole = np.minimum(table[:, 2] / unit, ENDLESS).astype(np.int32)
        return table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), whole, unit

    def cut(self, inside: NDArray[np.bool_], outside: NDArray[np.bool_]) -> tuple[float, NDArray[np.int64]]:
        """Return the fewest bytes over a cut after an ideal with all blocks `inside` and no block `outside`.

        Also return the blocks of that ideal.
        """
        # scipy takes a third of a second to import, and few graphs need it.
        import_whole(["scipy.sparse.csgraph"])
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        tail, head, capacity, unit = self.capacities
        source, sink = self.blocks, self.blocks + 1
        # Infinite arcs tie inside blocks to the source and outside blocks to the sink.
        held, left = np.flatnonzero(inside), np.flatnonzero(outside)
        tail = np.concatenate([np.where(tail == CALLER, source, tail), np.full(held.size, source), left])
        head = np.concatenate([np.where(head == SINK, sink, head), held, np.full(left.size, sink)])
        capacity = np.concatenate([capacity, np.full(held.size + left.size, ENDLESS, np.int32)])
        network = csr_array((capacity, (tail, head)), shape=(self.vertices, self.vertices))
        flow = maximum_flow(network, source, sink)
        # A minimum cut separates the vertices that the source still reaches over arcs with free capacity.
        residual = network.astype(np.int64) - flow.flow.astype(np.int64)
        residual.data = (residual.data > 0).astype(np.int8)
        residual.eliminate_zeros()
        side = breadth_first_order(residual, source, return_predecessors=False)
        return self.always + flow.flow_value * unit, side[side < self.blocks]
