"""A lower bound of a stage's memory, as sums over states, for the search.

The exact memory of a stage follows from simulating it node by node (see ir/facts/memory/stage.py), and is no difference
of two states' sums. So the search uses sums that never exceed it, and asks for the exact figure only for a chain it has
found (see fitting.py). The tighter the sums, the fewer chains fail that check.

The bound describes one moment of the stage, when it holds most microbatches (see moments.py). One of them is running.
The others are *resting*, between forward and backward, or *halfway*, between the halves of a split backward.
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
from fxsplit.planner.kernels.tables import NO_NEEDS, Floats, Ints, StageNeeds
from fxsplit.planner.lattice.lattice import sum_live_values


class Space(NamedTuple):
    """Memory of every kind and state, in bytes (see Tables)."""

    start: Floats
    end: Floats
    low: Floats
    needs: StageNeeds


@dataclass(frozen=True, eq=False)
class _Sums:
    """Quantities that the states lack, in bytes: float64 [states], and `far` [edges].

    - parameters, buffers: counted more than once, because nodes share them
    - unkept: values live across a state that no backward keeps
    - parked, waiting: activations kept by blocks that delay weight gradients, and the gradients kept with them
    - far: the need of an edge's block while it runs, including all activations before it
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
    """Return the memory tables.

    `kinds` has each figure of all kinds by name, as a column. `splits`: backwards are split into input and weight
    gradients.
    """
    copies = WEIGHT_COPIES + model.optimizer_factor + kinds["versions"]
    weights, buffers = states.column("parameter_bytes"), states.column("buffer_bytes")
    if not model.forwards or not costs.weighed:
        shared = _sum_ties(costs, chains) if model.forwards else np.zeros((len(states), 2))
        always = (weights - shared[:, 0]) * copies + buffers - shared[:, 1]
        return _sum_all(always, states, kinds, forwards=model.forwards)
    sums = _find_sums(costs, chains, splits=splits)
    # `sums` is 0 at a moment when the sums of gradients do not exist: memory then has one copy of the weights less.
    copies = copies + kinds["sums"] - 1.0
    always = (weights - sums.parameters) * copies + buffers - sums.buffers
    if costs.inference:
        return _sum_forwards(always, states, kinds, sums)
    loss = costs.find_loss(float(states.column("live_bytes")[-1]))
    return _sum_training(always, states, kinds, sums, loss, splits=splits)


def _sum_all(always: Floats, states: States, kinds: Mapping[str, Floats], *, forwards: bool) -> Space:
    """Return the memory of stages if only their activations and the values at their boundaries are known.

    This is so for profiles of other tools. always: the bytes that a stage holds without any microbatch. kinds: for each
    kind of stage, how many microbatches it holds, and whether it recomputes. forwards: a value that a later stage reads
    is handed on by the stages between.
    """
    others = kinds["resting"] * (kinds["recompute"] == 0) + kinds["halfway"]
    low = always + (others + 1.0) * states.column("kept_bytes")
    between = (kinds["resting"] + kinds["halfway"] + 1.0) * states.column("live_bytes") * forwards
    return Space(low - between, low + between, low, NO_NEEDS)


def _sum_forwards(always: Floats, states: States, kinds: Mapping[str, Floats], sums: _Sums) -> Space:
    """Return the tables for inference, which keeps no activations."""
    at_rest = always + kinds["resting"] * sums.unkept
    start = at_rest - (kinds["resting"] + 1.0) * states.column("live_bytes")
    return Space(start, at_rest, always, StageNeeds(sums.far, np.zeros(len(states))))


def _sum_training(
    always: Floats, states: States, kinds: Mapping[str, Floats], sums: _Sums, loss: LossCost, *, splits: bool
) -> Space:
    """Return the tables for the moment when one microbatch runs its backward, and others rest or are halfway.

    A resting microbatch has the stage's inputs, its activations, and outputs that are not activations. The running
    microbatch has the same, and the gradients of the stage's outputs; if the backward is split, it has the gradients
    that delayed weight gradients need instead.
    """
    resting, halfway, recompute = kinds["resting"], kinds["halfway"], kinds["recompute"] > 0
    kept, live, gradients = (states.column(name) for name in ("kept_bytes", "live_bytes", "live_gradient_bytes"))
    # One of the microbatches with activations is running.
    keeping = np.where(recompute, 0.0, resting) + 1.0
    # `low` has only sums that grow with the stage: the kernels drop starts by it.
    low = always + keeping * kept + halfway * (sums.parked + sums.waiting) + sums.waiting * splits
    arrived = np.zeros_like(gradients) if splits else gradients
    end = low + keeping * sums.unkept + arrived
    # The loss runs after the last stage, and keeps activations of its own.
    at_end = loss.kept_bytes + (0.0 if splits else loss.backward_peak_bytes)
    own, again = (keeping - 1.0) * loss.kept_bytes + at_end, resting * loss.kept_bytes + arrived[-1]
    last = kinds["last"][:, 0] > 0
    end[last, -1] = (low[:, -1:] + np.where(recompute, again, own))[last, 0]
    # The part of the running microbatch that the sums contain; at the end of the graph, its upper bound.
    freed = kept + arrived + sums.waiting * splits
    freed[-1] = freed[-1] - arrived[-1] + max(at_end, float(arrived[-1]))
    # A value that only passes through the stage is already counted as its input.
    start = low + keeping * sums.unkept - (resting + halfway + 1.0) * live
    return Space(start, end, low, StageNeeds(sums.far, freed))


@lru_cache(maxsize=8)  # one graph is planned for several numbers of stages and many machines
def _find_sums(costs: Costs, chains: Antichains, *, splits: bool) -> _Sums:
    """Return the sums of bytes over each ideal's nodes from which the memory of stages follows (see `_Sums`).

    splits: backwards are split into input and weight gradients.
    """
    far, members = _list_far(costs, splits=splits), chains.blocks.members
    of_block = np.array([max(far[name] for name in block) for block in members])
    # Edges are sorted by start; sort them by end.
    start = np.repeat(np.arange(len(chains)), np.diff(chains.pointer))
    added = chains.node[np.lexsort((start, chains.child))]
    waits = np.zeros((len(members), 2))
    for i, block in enumerate(members if splits else ()):
        nodes = [costs.by_name[name] for name in block]
        # If no node of a stage delays its weight gradients, its backward frees everything at once.
        if any(n.late_peak_bytes > 0 for n in nodes):
            late = (max(n.waiting_bytes, _find_own_gradient(costs, n)) for n in nodes if n.late_peak_bytes > 0)
            waits[i] = sum(n.kept_bytes for n in nodes), sum(late)
    waited = fit(kernel.prefix_sums, len(chains))(chains.parent, chains.last, waits)
    shared, unkept = _sum_ties(costs, chains), sum_live_values(costs, chains, costs.find_surely_unkept)
    return _Sums(*(np.ascontiguousarray(a) for a in (*shared.T, unkept, *waited.T, of_block[added])))


def _sum_ties(costs: Costs, chains: Antichains) -> NDArray[np.float64]:
    """Return the bytes of parameters and of buffers that sums over nodes count too often, as [states, 2].

    A stage has a tied parameter once. Each block that uses it counts an equal share, which is at most the true size.
    """
    less = np.zeros((len(chains.blocks), 2))
    for tie in costs.tied:
        # Nodes that stay together form one block, which certainly has the parameter.
        homes = [chains.blocks.home[name] for name in tie.nodes]
        for block in set(homes):
            more = homes.count(block) - 1.0 / len(set(homes))
            less[block] += more * tie.parameter_bytes, more * tie.buffer_bytes
    found: NDArray[np.float64] = fit(kernel.prefix_sums, len(chains))(chains.parent, chains.last, less)
    return found


def _list_far(costs: Costs, *, splits: bool) -> dict[str, float]:
    """Return, by node, the fewest bytes in use while its backward runs: activations up to it, and its own allocations.

    The stage has all activations of the node's ancestors, except those in earlier stages and those kept only for nodes
    that have already run their backward. Inference keeps none.
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
    # The ancestors of each node, and the node itself, as packed bits.
    before = np.zeros((len(costs.nodes), -(-len(costs.nodes) // 8)), np.uint8)
    found = {}
    for i, node in enumerate(costs.nodes):
        for name in node.inputs:
            if name in position:
                before[i] |= before[position[name]]
        before[i, i // 8] |= 128 >> i % 8
        for owner in kept_for[node.name]:
            place = position[owner.name]
            # The owner is an ancestor, so it is certainly in this stage or an earlier one.
            if before[i, place // 8] & 128 >> place % 8:
                kept[i] += owner.kept_for_bytes
        there = float(kept @ np.unpackbits(before[i], count=kept.size))
        # Gradients of several outputs may make up most of the allocation, and are already counted while they wait.
        allocates = 0.0 if node.name in several else _find_allocated(node, splits=splits)
        found[node.name] = there + allocates + _find_own_gradient(costs, node)
    return found


def _find_allocated(node: NodeCost, *, splits: bool) -> float:
    """Return the bytes that a node's backward allocates; of a split backward, its first half."""
    return node.halved_peak_bytes if splits and node.late_peak_bytes > 0 else node.backward_peak_bytes


def _find_own_gradient(costs: Costs, node: NodeCost) -> float:
    """Return the bytes of the gradient that a node's backward starts from, or 0 if it may share other memory."""
    _, _, gradient_bytes, readers, returned = costs.value_of[node.name]
    lent = any(costs.by_name[reader].lent_bytes > 0 for reader in readers)
    return gradient_bytes if (readers or returned) and not lent and not is_part_of_several(node) else 0.0


def carry_along_line(needs: StageNeeds, in_ptr: Ints, in_from: Ints, order: NDArray[np.int64]) -> StageNeeds:
    """Return the needs restricted to the states in `order`, which grow by one block each."""
    edges = []
    for before, after in pairwise(order):
        below = in_from[in_ptr[after] : in_ptr[after + 1]]
        edges.append(int(in_ptr[after]) + int(np.flatnonzero(below == before)[0]))
    return StageNeeds(needs.far[edges], needs.freed[order])


def list_pairs(needs: StageNeeds, in_ptr: Ints, in_from: Ints) -> Floats:
    """Return the additional bytes of the stage from state J to state I, as [J, I]; undefined if J is not inside I."""
    n = needs.freed.size
    # Index by (end, start), so that a row is contiguous. -inf means that no path leads from start to end.
    far = np.full((n, n), -np.inf)
    for i in range(n):
        far[i, i] = 0.0
        for e in range(in_ptr[i], in_ptr[i + 1]):
            j = in_from[e]
            np.maximum(far[i], np.maximum(far[j], needs.far[e]), out=far[i], where=far[j] > -np.inf)
    found: Floats = np.ascontiguousarray(np.maximum(far - needs.freed[:, None], 0.0).T)
    return found
