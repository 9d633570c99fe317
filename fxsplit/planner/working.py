"""Working memory on the lattice: what the search needs to know what a stage holds besides what sums over its nodes.

The definition is ir/facts/working.py. The need of the node that needs most is no sum, but it can be carried along the
edges of the lattice: each edge adds one block, and whichever way leads from one ideal to another, the same blocks are
added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.working import LOSS_COPIES, LOSS_KEEPS, list_rooms
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels import lattice as kernel
from fxsplit.planner.kernels.tables import Floats, Ints, Needs
from fxsplit.planner.lattice import sum_live_values

NOTHING = Needs(*[np.zeros(0)] * 5)
"""Of a problem in which working memory does not count."""


@dataclass(frozen=True, eq=False)
class Working:
    """What of a stage's memory the states do not say, in bytes; float64 [states] but for `needs`.

    handed: gradients of small parameters, summed. waiting: what halves of backwards wait with, summed. unkept: the
    values that are live across a state and that no backward keeps. ends: how often a stage that recomputes has the
    outputs of the model. blocks: float64 [blocks, 2], what each block needs near and far (see Needs).
    """

    needs: Needs
    handed: Floats
    waiting: Floats
    unkept: Floats
    ends: float
    blocks: Floats


@lru_cache(maxsize=8)  # a graph is planned for several numbers of stages, and for many machines
def find_working(costs: Costs, chains: Antichains, *, splits: bool) -> Working:
    """Return the working memory of a lattice; `splits` tells whether backwards are divided in two."""
    rooms, names = list_rooms(costs, splits=splits), [n.name for n in costs.nodes]
    members = chains.blocks.members
    near = np.array([max(rooms[name].near_bytes for name in block) for block in members])
    far = np.array([max(rooms[name].far_bytes for name in block) for block in members])
    sums = np.array(
        [[sum(getattr(costs.by_name[name], figure) for name in block) for figure in FIGURES] for block in members],
        np.float64,
    ).reshape(-1, len(FIGURES))
    summed = fit(kernel.prefix_sums, len(chains))(chains.parent, chains.last, sums)
    kept = np.ascontiguousarray(summed[:, 0])
    # Blocks in the order of their first nodes, and what is kept before each of these.
    position = {name: i for i, name in enumerate(names)}
    first = np.array([min(position[name] for name in block) for block in members], np.int64)
    order = np.argsort(first, kind="stable").astype(np.int32)
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size, dtype=np.int32)
    prior = np.array([rooms[names[first[b]]].prior_bytes for b in order] + [kept[-1]], np.float64)
    missing = fit(kernel.first_missing, len(chains))(chains.parent, chains.last, rank)
    loss = np.zeros(len(chains))
    if not costs.inference:
        loss[-1] = LOSS_COPIES * chains.live_bytes[-1]
    # The edges come by their start, and are wanted by their end.
    start = np.repeat(np.arange(len(chains)), np.diff(chains.pointer))
    added = chains.node[np.lexsort((start, chains.child))]
    unkept = sum_live_values(costs, chains, costs.find_unkept)
    if not costs.inference:
        # Of the outputs of the model the loss keeps as much as there is.
        unkept[-1] = LOSS_KEEPS * chains.live_bytes[-1]
    # Divided backwards free nothing while they run, so that there is no second bound.
    needs = Needs(
        near=near[added],
        far=np.full(added.size, np.inf) if splits else far[added],
        lead=np.zeros(len(chains)) if splits else prior[missing] - kept,
        freed=kept - (chains.live_bytes - unkept),
        loss=loss,
    )
    handed, waiting = (np.ascontiguousarray(summed[:, column]) for column in (1, 2))
    blocks = np.column_stack([near, np.full(far.size, np.inf) if splits else far])
    ends = 1.0 if costs.inference else 2.0
    return Working(needs, handed, waiting * splits, unkept, ends, blocks)


FIGURES = ("kept_bytes", "handed_bytes", "waiting_bytes")
"""What sums over the nodes of a state."""


def carry_along_line(needs: Needs, in_ptr: Ints, in_from: Ints, order: NDArray[np.int64]) -> Needs:
    """Return the needs of the states of `order` alone, each of which has one block more than the one before."""
    edges = []
    for before, after in pairwise(order):
        below = in_from[in_ptr[after] : in_ptr[after + 1]]
        edges.append(int(in_ptr[after]) + int(np.flatnonzero(below == before)[0]))
    return Needs(needs.near[edges], needs.far[edges], needs.lead[order], needs.freed[order], needs.loss[order])


def list_pairs(needs: Needs, in_ptr: Ints, in_from: Ints) -> Floats:
    """Return what the stage from state J to state I needs besides, [J, I]; any figure where J is not inside I."""
    n = needs.lead.size
    # By end and start, so that a row is one piece of memory. Where no way leads there is nothing to carry.
    near, far = np.full((n, n), -np.inf), np.full((n, n), -np.inf)
    for i in range(n):
        near[i, i] = far[i, i] = 0.0
        for e in range(in_ptr[i], in_ptr[i + 1]):
            j = in_from[e]
            there = near[j] > -np.inf
            np.maximum(near[i], np.maximum(near[j], needs.near[e]), out=near[i], where=there)
            np.maximum(far[i], np.maximum(far[j], needs.far[e]), out=far[i], where=there)
    behind = far - needs.lead - needs.freed[:, None]
    found: Floats = np.ascontiguousarray(np.maximum(np.minimum(near, behind), needs.loss[:, None]).T)
    return found
