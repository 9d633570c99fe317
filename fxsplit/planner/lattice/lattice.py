"""From costs to the lattice of ideals, with the bytes that are live across each ideal.

The ideals of a graph form a lattice: an edge leads from each ideal to every ideal with one more block.

    a -> b        {} -> a -> ab          a chain of n blocks has n + 1 ideals

    a             {} -> a                n independent blocks have 2^n ideals
    b              |    |
                   v    v
                   b -> ab

In the paper that planner/__init__.py cites, the states are the ideals except {}, each named by its augmented antichain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.lattice.antichains import Antichains, Slack
from fxsplit.ir.facts.lattice.arrays import Ints
from fxsplit.ir.facts.lattice.blocks import Blocks, build_csr
from fxsplit.planner import kernels
from fxsplit.planner.kernels import lattice as kernel
from fxsplit.planner.lattice.contraction import contract_costless_nodes, contract_light_nodes, memory_may_bind
from fxsplit.planner.lattice.cuts import find_cut_levels


def antichains(costs: Costs, max_states: int, blocks: Blocks | None = None) -> Antichains:
    """Return every ideal of the blocks; beyond `max_states`, only the ideals of one topological order.

    `blocks` default to the smallest sets of nodes that `costs` keeps together. Pass contracted blocks for fewer ideals.
    """
    blocks = blocks or Blocks.of(costs)
    # The number of ideals is unknown beforehand: the kernel enumerates up to the limit, and then gives up.
    indegree = np.array([len(b) for b in blocks.before], np.int32)
    parent, last, complete = kernels.enumerate_ideals(indegree, *build_csr(blocks.after), max_states)
    # The block numbers form a topological order, and each prefix of it is an ideal.
    if not complete:
        parent = last = np.arange(-1, len(blocks), dtype=np.int32)
    pointer, node, child = kernels.fit(kernel.lattice_edges, parent.size)(parent, last)
    live = _live(costs, blocks, parent, last)
    values, gradients, sent = live.T
    return _vouch(Antichains(blocks, parent, last, pointer, node, child, values, gradients, sent, complete))


def _vouch(chains: Antichains) -> Antichains:
    """Mark the ideals as the planner's own. If a pass replaces a field, the copy lacks the mark.

    A plan over ideals without the mark is not called optimal.
    """
    object.__setattr__(chains, "enumerated", True)
    return chains


MOST_CELLS = 2**27
"""Limits ideals x devices. A search needs 16 bytes for each, so its tables take at most 2 GiB."""
LIGHT = (1e-5, 1e-4, 1e-3, 1e-2)
"""Shares of the total work below which a node counts as light, tried in turn until the ideals are few enough."""


def enumerate_ideals(
    costs: Costs,
    machine: Machine | None,
    pinned: Mapping[str, int],
    max_states: int,
    *,
    join: bool,
    ms_per_byte: float = 0.0,
) -> Antichains:
    """Return the ideals for planning on a machine: at most `max_states`, fewer for very many devices.

    With `join`, costless nodes join neighbours, and so do light nodes if the ideals are too many. This may leave a
    stage empty, and so move all later stages up one device: devices must be interchangeable (see moves.py). Nodes in
    `pinned` (node -> device) never join. `ms_per_byte` is the time that replicas take to reduce one byte of gradients,
    for plans with replicas: nodes with many parameters are then not light.
    """
    blocks = Blocks.of(costs)
    if machine is not None:
        max_states = max(1, min(max_states, MOST_CELLS // len(machine)))
    memory_bytes = min(d.memory_bytes for d in machine.devices) if machine else inf
    fewer = contract_costless_nodes(costs, blocks, pinned, memory_bytes) if join else blocks
    at_least = len(machine) if machine and join else len(fewer)
    # If memory may bind, joining nodes could rule out every plan.
    shares = () if memory_may_bind(costs, memory_bytes) else LIGHT
    tries = (contract_light_nodes(costs, fewer, pinned, share * costs.total_ms, ms_per_byte) for share in shares)
    found = _enumerate_within(costs, fewer, pinned, max_states, tries, at_least)
    known = set(blocks.members)
    joined = frozenset(n for names in found.blocks.members if names not in known for n in names)
    return _vouch(replace(found, joined=joined, max_states=max_states))


def _enumerate_within(
    costs: Costs,
    blocks: Blocks,
    pinned: Mapping[str, int],
    max_states: int,
    tries: Iterable[tuple[Blocks, Slack]],
    at_least: int,
) -> Antichains:
    """Return all ideals if they are at most `max_states`, else ideals of fewer blocks or of one order.

    First try `tries`, which join more and more light nodes, while at least `at_least` blocks are left; `slack` then
    bounds the loss due to joining. If this is not enough, return the ideals of one topological order along light cuts,
    sorted by pins, with bounds for all other ideals.
    """
    found = antichains(costs, max_states, blocks)
    if found.complete:
        return found
    for smaller, slack in tries:
        if len(smaller) < at_least:
            break
        fewer = antichains(costs, max_states, smaller)
        # Join as little as possible: heavier groups would widen the gap of the bound.
        if fewer.complete:
            return replace(fewer, slack=slack)
    # One topological order is always within reach: it has one ideal for each block, and the empty one.
    levels, order = find_cut_levels(costs, blocks)
    line = blocks.reordered(_sort_by_pins(blocks, order, pinned))
    return replace(antichains(costs, 1, line), levels=levels)


def _sort_by_pins(blocks: Blocks, order: Sequence[int], pinned: Mapping[str, int]) -> list[int]:
    """Return a topological order close to `order` in which pinned blocks come in the order of their devices.

    If no such order exists, return `order`: with devices in any order, a plan may still satisfy the pins.
    """
    least: dict[int, float] = {}
    for name, device in pinned.items():
        block = blocks.home[name]
        least[block] = min(device, least.get(block, inf))
    # The latest stage of a block: no descendant may lie in an earlier stage.
    latest = [inf] * len(blocks)
    for b in reversed(order):
        latest[b] = min([least.get(b, inf), *(latest[a] for a in blocks.after[b])])
    if any(latest[b] < device for b, device in least.items()):
        return list(order)
    # The sort is stable and a descendant's latest stage is never earlier, so the order stays topological.
    return sorted(order, key=lambda b: latest[b])


def sum_live_values(costs: Costs, chains: Antichains, find: Callable[[str, float], float]) -> NDArray[np.float64]:
    """Return for each ideal the sum of find(name, bytes) over the values live across it, as float64 [ideals]."""
    live = _live(costs, chains.blocks, chains.parent, chains.last, find)
    return np.ascontiguousarray(live[:, 0])


def count_live_messages(costs: Costs, chains: Antichains) -> NDArray[np.float64]:
    """Return the messages over a cut after each ideal, as float64 [ideals]: values forward and gradients back.

    The count is exact, unlike a sum of bytes, which need not be 0 if nothing crosses.
    """
    sizes = _live(costs, chains.blocks, chains.parent, chains.last, count=True)
    return (sizes[:, 0] > 0).astype(np.float64) + (sizes[:, 1] > 0)


def _live(
    costs: Costs,
    blocks: Blocks,
    parent: Ints,
    last: Ints,
    find: Callable[[str, float], float] = lambda name, output_bytes: output_bytes,
    *,
    count: bool = False,
) -> NDArray[np.float64]:
    """Return bytes live across each ideal, float64 [ideals, 3]: values (as found by `find`), gradients, sent.

    With `count`, each counts 1 if it has any bytes.

    The *pins* of a value are the blocks that make or read it. A value is live across an ideal if the ideal contains
    some of its pins, but not all. The caller is one more pin: always inside for an input of the model, never for an
    output.
    """
    pins: list[list[int]] = [[] for _ in blocks.members]
    inside: list[int] = []
    total: list[int] = []
    size: list[tuple[float, float, float]] = []

    def add(names: tuple[str, ...], given: bool, returned: bool, sizes: tuple[float, float, float]) -> None:
        met = sorted({blocks.home[name] for name in names})
        # A value with a single pin crosses no cut.
        if len(met) + given + returned < 2:
            return
        for block in met:
            pins[block].append(len(size))
        inside.append(int(given))
        total.append(len(met) + given + returned)
        size.append(sizes)

    for name, output_bytes, gradient_bytes, readers, is_output in costs.values:
        # A value that no node makes is an input of the model, from the caller.
        made = name in blocks.home
        sizes_ = find(name, output_bytes), gradient_bytes, sum(costs.sent[name])
        add((name, *readers) if made else readers, not made, is_output, sizes_)
    for exchange in costs.exchanges:
        add(exchange.nodes, False, False, (0.0, exchange.output_bytes, exchange.output_bytes))
    sizes = np.array(size, np.float64).reshape(-1, 3)
    if count:
        sizes = (sizes > 0).astype(np.float64)
    return kernels.fit(kernel.live_bytes, parent.size)(
        parent, last, *build_csr(pins), np.array(inside, np.int32), np.array(total, np.int32), sizes
    )
