"""A lower bound of what a stage holds in memory, as sums over states, for the search.

What a stage holds, to the byte, follows it from node to node (see ir/facts/memory/stage.py), which is no difference of
two states' sums. So the search keeps to sums that are never above it, and asks for the true figure where it has found a
chain (see fitting.py). The closer the sums are, the fewer chains are found in vain.

The bound is of one moment of the stage: that with most microbatches (see moments.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.costs.loss import LossCost
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.memory.gradients import is_part_of_several
from fxsplit.ir.facts.memory.stage import WEIGHT_COPIES
from fxsplit.ir.facts.price import CostModel
from fxsplit.planner.kernels import fit
from fxsplit.planner.kernels import lattice as kernel
from fxsplit.planner.kernels.tables import NO_NEEDS, Floats, Ints, Needs
from fxsplit.planner.lattice.lattice import sum_live_values


class Space(NamedTuple):
    """Tables of memory of every kind and state, in bytes (see Tables)."""

    start: Floats
    end: Floats
    low: Floats
    needs: Needs


@dataclass(frozen=True, eq=False)
class _Sums:
    """What the states do not say, in bytes, float64 [states] but for `far`, of edges.

    parameters, buffers: how much less a stage has of them at least, as nodes share some. unkept: values that are live
    across a state and that no backward keeps. parked, waiting: what blocks that leave gradients of weights for later
    keep, and the gradients that wait with it. far: what the block of an edge needs, with all activations before it.
    """

    parameters: Floats
    buffers: Floats
    unkept: Floats
    parked: Floats
    waiting: Floats
    far: Floats


def price_space(
    costs: Costs, chains: Antichains, states: States, kinds: Mapping[str, Floats], model: CostModel, *, splits: bool
) -> Space:
    """Return the tables of memory; `kinds` has each figure of every Kind by its name, as a column."""
    copies = WEIGHT_COPIES + model.optimizer_factor + kinds["versions"]
    weights, buffers = states.column("parameter_bytes"), states.column("buffer_bytes")
    if not model.forwards or not costs.weighed:
        shared = _sum_ties(costs, chains) if model.forwards else np.zeros((len(states), 2))
        always = (weights - shared[:, 0]) * copies + buffers - shared[:, 1]
        return _sum_all(always, states, kinds, forwards=model.forwards)
    sums = _find_sums(costs, chains, splits=splits)
    # Before there are sums of gradients there is one set of the weights' size less.
    copies = copies + kinds["sums"] - 1.0
    always = (weights - sums.parameters) * copies + buffers - sums.buffers
    if costs.inference:
        return _sum_forwards(always, states, kinds, sums)
    loss = costs.find_loss(float(states.column("live_bytes")[-1]))
    return _sum_training(always, states, kinds, sums, loss, splits=splits)


def _sum_all(always: Floats, states: States, kinds: Mapping[str, Floats], *, forwards: bool) -> Space:
    """Return the tables where each microbatch holds its activations and boundary values, and nothing else is known."""
    others = kinds["resting"] * (kinds["recompute"] == 0) + kinds["halfway"]
    low = always + (others + 1.0) * states.column("kept_bytes")
    between = (kinds["resting"] + kinds["halfway"] + 1.0) * states.column("live_bytes") * forwards
    return Space(low - between, low + between, low, NO_NEEDS)


def _sum_forwards(always: Floats, states: States, kinds: Mapping[str, Floats], sums: _Sums) -> Space:
    """Return the tables of forwards alone, which keep nothing."""
    at_rest = always + kinds["resting"] * sums.unkept
    start = at_rest - (kinds["resting"] + 1.0) * states.column("live_bytes")
    return Space(start, at_rest, always, Needs(sums.far, np.zeros(len(states))))


def _sum_training(
    always: Floats, states: States, kinds: Mapping[str, Floats], sums: _Sums, loss: LossCost, *, splits: bool
) -> Space:
    """Return the tables of a moment in which one microbatch runs backward, and others rest or are halfway.

    A microbatch at rest has what the stage was given, keeps, and gives without keeping it. The one in hand has that
    too. Besides it has the gradients of what the stage gives, or, in a divided backward, those that weights wait with.
    """
    resting, halfway, recompute = kinds["resting"], kinds["halfway"], kinds["recompute"] > 0
    kept, live, gradients = (states.column(name) for name in ("kept_bytes", "live_bytes", "live_gradient_bytes"))
    # Of the microbatches with activations, one is in hand.
    keeping = np.where(recompute, 0.0, resting) + 1.0
    # Only sums that grow with a stage: the kernels drop a start by them.
    low = always + keeping * kept + halfway * (sums.parked + sums.waiting) + sums.waiting * splits
    arrived = np.zeros_like(gradients) if splits else gradients
    end = low + keeping * sums.unkept + arrived
    # The loss is computed behind the last stage, and keeps what it needs of the outputs.
    at_end = loss.kept_bytes + (0.0 if splits else loss.backward_peak_bytes)
    own, again = (keeping - 1.0) * loss.kept_bytes + at_end, resting * loss.kept_bytes + arrived[-1]
    last = kinds["last"][:, 0] > 0
    end[last, -1] = (low[:, -1:] + np.where(recompute, again, own))[last, 0]
    # What the sums have of the microbatch in hand; at the end all that they may have.
    freed = kept + arrived + sums.waiting * splits
    freed[-1] = freed[-1] - arrived[-1] + max(at_end, float(arrived[-1]))
    # A value that only passes through is among those that the stage was given.
    start = low + keeping * sums.unkept - (resting + halfway + 1.0) * live
    return Space(start, end, low, Needs(sums.far, freed))


@lru_cache(maxsize=8)  # a graph is planned for several numbers of stages, and for many machines
def _find_sums(costs: Costs, chains: Antichains, *, splits: bool) -> _Sums:
    """Return what the states do not say; `splits` tells whether backwards are divided in two."""
    far, members = _list_far(costs, splits=splits), chains.blocks.members
    of_block = np.array([max(far[name] for name in block) for block in members])
    # The edges come by their start, and are wanted by their end.
    start = np.repeat(np.arange(len(chains)), np.diff(chains.pointer))
    added = chains.node[np.lexsort((start, chains.child))]
    waits = np.zeros((len(members), 2))
    for i, block in enumerate(members if splits else ()):
        nodes = [costs.by_name[name] for name in block]
        # Where no node of a stage waits, its backward frees all at once.
        if any(n.late_peak_bytes > 0 for n in nodes):
            late = (max(n.waiting_bytes, _find_own_gradient(costs, n)) for n in nodes if n.late_peak_bytes > 0)
            waits[i] = sum(n.kept_bytes for n in nodes), sum(late)
    waited = fit(kernel.prefix_sums, len(chains))(chains.parent, chains.last, waits)
    shared, unkept = _sum_ties(costs, chains), sum_live_values(costs, chains, costs.find_surely_unkept)
    return _Sums(*(np.ascontiguousarray(a) for a in (*shared.T, unkept, *waited.T, of_block[added])))


def _sum_ties(costs: Costs, chains: Antichains) -> NDArray[np.float64]:
    """Return by how much sums of parameters, and of buffers, are to be less, as several nodes have some: [states, 2].

    A stage has a tied parameter once. Each block that has it counts a share of it, which is no more.
    """
    less = np.zeros((len(chains.blocks), 2))
    for tie in costs.tied:
        # Nodes that stay together are one block, which has the parameter for certain.
        homes = [chains.blocks.home[name] for name in tie.nodes]
        for block in set(homes):
            more = homes.count(block) - 1.0 / len(set(homes))
            less[block] += more * tie.parameter_bytes, more * tie.buffer_bytes
    found: NDArray[np.float64] = fit(kernel.prefix_sums, len(chains))(chains.parent, chains.last, less)
    return found


def _list_far(costs: Costs, *, splits: bool) -> dict[str, float]:
    """Return what there is at least, by node, while the node runs: activations up to it, and what it allocates.

    A stage has all that the node's ancestors keep but for what earlier stages have, and for what only nodes keep that
    have run backward. Without backwards nothing is kept.
    """
    if costs.inference:
        return {n.name: n.forward_peak_bytes or 0.0 for n in costs.nodes}
    position = {node.name: i for i, node in enumerate(costs.nodes)}
    several = {n.inputs[0] for n in costs.nodes if is_part_of_several(n)}
    kept = np.array([n.kept_bytes - n.kept_for_bytes for n in costs.nodes], np.float64)
    kept_for: dict[str, list[NodeCost]] = defaultdict(list)
    for node in costs.nodes:
        if node.kept_for_bytes:
            kept_for[node.kept_for].append(node)
    # The ancestors of each node and the node itself, as packed bits.
    before = np.zeros((len(costs.nodes), -(-len(costs.nodes) // 8)), np.uint8)
    found = {}
    for i, node in enumerate(costs.nodes):
        for name in node.inputs:
            if name in position:
                before[i] |= before[position[name]]
        before[i, i // 8] |= 128 >> i % 8
        for owner in kept_for[node.name]:
            place = position[owner.name]
            # Where it is sure that the owner is in this stage, or in an earlier one.
            if before[i, place // 8] & 128 >> place % 8:
                kept[i] += owner.kept_for_bytes
        there = float(kept @ np.unpackbits(before[i], count=kept.size))
        # Gradients of several outputs, which wait for the node, may be most of what it allocates.
        allocates = 0.0 if node.name in several else _find_allocated(node, splits=splits)
        found[node.name] = there + allocates + _find_own_gradient(costs, node)
    return found


def _find_allocated(node: NodeCost, *, splits: bool) -> float:
    """Return what a node's backward allocates, or its first half."""
    return node.halved_peak_bytes if splits and node.late_peak_bytes > 0 else node.backward_peak_bytes


def _find_own_gradient(costs: Costs, node: NodeCost) -> float:
    """Return the gradient that a node's backward starts from, if it surely is memory of its own."""
    _, _, gradient_bytes, readers, returned = costs.value_of[node.name]
    lent = any(costs.by_name[reader].lent_bytes > 0 for reader in readers)
    return gradient_bytes if (readers or returned) and not lent and not is_part_of_several(node) else 0.0


def carry_along_line(needs: Needs, in_ptr: Ints, in_from: Ints, order: NDArray[np.int64]) -> Needs:
    """Return the needs of the states of `order` alone, each of which has one block more than the one before."""
    edges = []
    for before, after in pairwise(order):
        below = in_from[in_ptr[after] : in_ptr[after + 1]]
        edges.append(int(in_ptr[after]) + int(np.flatnonzero(below == before)[0]))
    return Needs(needs.far[edges], needs.freed[order])


def list_pairs(needs: Needs, in_ptr: Ints, in_from: Ints) -> Floats:
    """Return what the stage from state J to state I needs besides, [J, I]; any figure where J is not inside I."""
    n = needs.freed.size
    # By end and start, so that a row is one piece of memory. Where no way leads there is nothing to carry.
    far = np.full((n, n), -np.inf)
    for i in range(n):
        far[i, i] = 0.0
        for e in range(in_ptr[i], in_ptr[i + 1]):
            j = in_from[e]
            np.maximum(far[i], np.maximum(far[j], needs.far[e]), out=far[i], where=far[j] > -np.inf)
    found: Floats = np.ascontiguousarray(np.maximum(far - needs.freed[:, None], 0.0).T)
    return found
