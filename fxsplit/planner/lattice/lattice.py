"""From costs to the lattice of ideals, with the bytes that are live across each.

The ideals of a graph form a lattice: an edge leads from each ideal to every ideal with one block more. A chain of n
blocks has n + 1 ideals. Parallel branches multiply: 8 independent nodes have 2^8. The paper's states are the ideals
other than {}, each named by its augmented antichain (see planner/__init__.py).
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
    """Return every ideal of the blocks, or those of one topological order where there are more than `max_states`.

    The blocks are those that `costs` demand, unless `blocks` are given, which have been contracted further.
    """
    blocks = blocks or Blocks.of(costs)
    # The kernel enumerates up to the limit and then gives up: the number is not known before.
    indegree = np.array([len(b) for b in blocks.before], np.int32)
    parent, last, complete = kernels.enumerate_ideals(indegree, *build_csr(blocks.after), max_states)
    # The blocks are numbered in a topological order, and the prefixes of that order are ideals too.
    if not complete:
        parent = last = np.arange(-1, len(blocks), dtype=np.int32)
    pointer, node, child = kernels.fit(kernel.lattice_edges, parent.size)(parent, last)
    live = _live(costs, blocks, parent, last)
    values, gradients, sent = live.T
    return _vouch(Antichains(blocks, parent, last, pointer, node, child, values, gradients, sent, complete))


def _vouch(chains: Antichains) -> Antichains:
    """Return the ideals, marked as enumerated by the planner. A pass that replaces some by its own loses the mark."""
    object.__setattr__(chains, "enumerated", True)
    return chains


MOST_CELLS = 2**27
"""Ideals times devices at most: a search keeps 16 bytes for each, so that its tables take two GiB at most."""
LIGHT = (1e-5, 1e-4, 1e-3, 1e-2)
"""Shares of all work that nodes may take to count as light, tried in turn until the ideals are few enough."""


def enumerate_ideals(
    costs: Costs,
    machine: Machine | None,
    pinned: Mapping[str, int],
    max_states: int,
    *,
    join: bool,
    ms_per_byte: float = 0.0,
) -> Antichains:
    """Return the ideals to plan on for a machine, at most `max_states` of them, and fewer for very many devices.

    With `join`, costless nodes join neighbours first, and light ones too where there are too many ideals. That may
    empty a stage, so that all later stages move up a device: the devices must be interchangeable (see moves.py).
    `pinned` maps nodes to their devices; they stay by themselves. `ms_per_byte` is what replicas of a stage take to sum
    a byte of gradients, where a plan may have replicas: nodes with many parameters are not light then.
    """
    blocks = Blocks.of(costs)
    if machine is not None:
        max_states = max(1, min(max_states, MOST_CELLS // len(machine)))
    memory_bytes = min(d.memory_bytes for d in machine.devices) if machine else inf
    fewer = contract_costless_nodes(costs, blocks, pinned, memory_bytes) if join else blocks
    at_least = len(machine) if machine and join else len(fewer)
    # Where memory may bind, joining nodes could make a plan impossible.
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
    """Return every ideal if there are at most `max_states`, else those of fewer blocks, or of one topological order.

    The blocks of `tries`, in which ever more light nodes have joined others, come first, as long as `at_least` so many
    blocks are left; `slack` then says how much faster a plan that parts them could be. If that is not enough, the
    ideals of one topological order are returned, which goes along light cuts as far as pins allow, with bounds for all
    other ideals.
    """
    found = antichains(costs, max_states, blocks)
    if found.complete:
        return found
    for smaller, slack in tries:
        if len(smaller) < at_least:
            break
        fewer = antichains(costs, max_states, smaller)
        # The lightest nodes that suffice: heavier ones would cost more of the bound.
        if fewer.complete:
            return replace(fewer, slack=slack)
    # A lattice of one state more than the blocks there are is always within reach: that of a line.
    levels, order = find_cut_levels(costs, blocks)
    line = blocks.reordered(_sort_by_pins(blocks, order, pinned))
    return replace(antichains(costs, 1, line), levels=levels)


def _sort_by_pins(blocks: Blocks, order: Sequence[int], pinned: Mapping[str, int]) -> list[int]:
    """Return a topological order in which what is pinned to a device comes before what is pinned to a later one.

    Otherwise it is as `order`. It is `order` itself if no order can do so: devices in any order may suit the pins then.
    """
    least: dict[int, float] = {}
    for name, device in pinned.items():
        block = blocks.home[name]
        least[block] = min(device, least.get(block, inf))
    # The latest stage of a block: nothing that needs it may lie in an earlier one.
    latest = [inf] * len(blocks)
    for b in reversed(order):
        latest[b] = min([least.get(b, inf), *(latest[a] for a in blocks.after[b])])
    if any(latest[b] < device for b, device in least.items()):
        return list(order)
    # What needs a block has no earlier stage than the block, and sorting keeps the order of equal ones.
    return sorted(order, key=lambda b: latest[b])


def sum_live_values(costs: Costs, chains: Antichains, find: Callable[[str, float], float]) -> NDArray[np.float64]:
    """Return what is live across each ideal, float64 [ideals]: the sum of what `find` says of a value and its bytes."""
    live = _live(costs, chains.blocks, chains.parent, chains.last, find)
    return np.ascontiguousarray(live[:, 0])


def _live(
    costs: Costs,
    blocks: Blocks,
    parent: Ints,
    last: Ints,
    find: Callable[[str, float], float] = lambda name, output_bytes: output_bytes,
) -> NDArray[np.float64]:
    """Return the bytes of values, as `find` says, of gradients, and of both as sent, live across each ideal.

    float64 [ideals, 3].

    The *pins* of a value are the blocks that make or read it. A value is live across an ideal if some of its pins lie
    inside and some outside. The caller is a pin too: inside from the start for what the model is given, and never
    inside for what the model returns.
    """
    pins: list[list[int]] = [[] for _ in blocks.members]
    inside: list[int] = []
    total: list[int] = []
    size: list[tuple[float, float, float]] = []

    def add(names: tuple[str, ...], given: bool, returned: bool, sizes: tuple[float, float, float]) -> None:
        met = sorted({blocks.home[name] for name in names})
        # A value of a single pin crosses no cut.
        if len(met) + given + returned < 2:
            return
        for block in met:
            pins[block].append(len(size))
        inside.append(int(given))
        total.append(len(met) + given + returned)
        size.append(sizes)

    for name, output_bytes, gradient_bytes, readers, is_output in costs.values:
        # What no node makes is an input of the model, which the caller makes.
        made = name in blocks.home
        sizes_ = find(name, output_bytes), gradient_bytes, sum(costs.sent[name])
        add((name, *readers) if made else readers, not made, is_output, sizes_)
    for exchange in costs.exchanges:
        add(exchange.nodes, False, False, (0.0, exchange.output_bytes, exchange.output_bytes))
    sizes = np.array(size, np.float64).reshape(-1, 3)
    return kernels.fit(kernel.live_bytes, parent.size)(
        parent, last, *build_csr(pins), np.array(inside, np.int32), np.array(total, np.int32), sizes
    )
