"""From costs to the lattice of ideals, with what is live across each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.antichains import Antichains
from fxsplit.ir.facts.blocks import Blocks, Ints, build_csr
from fxsplit.ir.facts.costs import Costs
from fxsplit.planner import kernels
from fxsplit.planner.contraction import contract_light_nodes, memory_may_bind
from fxsplit.planner.cuts import find_cut_levels


def antichains(costs: Costs, max_states: int, blocks: Blocks | None = None) -> Antichains:
    """Return every ideal of the blocks, or one topological order's where there are more than `max_states`.

    The blocks are those that `costs` demand, unless some are given that have been contracted further.
    """
    blocks = blocks or Blocks.of(costs)
    indegree = np.array([len(b) for b in blocks.before], np.int32)
    parent, last, complete = kernels.enumerate_ideals(indegree, *build_csr(blocks.after), max_states)
    if not complete:
        parent = np.arange(-1, len(blocks), dtype=np.int32)
        last = np.arange(-1, len(blocks), dtype=np.int32)
    pointer, node, child = kernels.lattice_edges(parent, last)
    live = _live(costs, blocks, parent, last)
    return Antichains(blocks, parent, last, pointer, node, child, live[:, 0], live[:, 1], complete)


LIGHT = (1e-5, 1e-4, 1e-3, 1e-2)
"""Shares of all work that nodes may take to count as light, tried in turn until the ideals are few enough."""


def enumerate_within(
    costs: Costs, blocks: Blocks, max_states: int, memory_bytes: float, apart: Collection[str], at_least: int
) -> Antichains:
    """Return every ideal, of as many blocks (`at_least` so many) as can be kept apart with at most `max_states` ideals.

    Where light nodes had to join others, `slack_ms` says how much faster a plan that parts them could be. Where that is
    not enough, or memory may bind, so that joining could make a plan impossible, those of one topological order are
    returned, which goes along light cuts, with bounds for all others.
    """
    found = antichains(costs, max_states, blocks)
    if found.complete:
        return found
    for share in () if memory_may_bind(costs, memory_bytes) else LIGHT:
        smaller, slack = contract_light_nodes(costs, blocks, apart, share * costs.total_ms)
        if len(smaller) < at_least:
            break
        fewer = antichains(costs, max_states, smaller)
        if fewer.complete:
            return replace(fewer, slack_ms=slack)
    levels, order = find_cut_levels(costs, blocks)
    return replace(antichains(costs, 1, blocks.reordered(order)), levels=levels)


def _live(costs: Costs, blocks: Blocks, parent: Ints, last: Ints) -> NDArray[np.float64]:
    """Return the bytes of values and of gradients live across each ideal, float64 [ideals, 2].

    A value is live where some of its pins (maker, readers) are inside and some outside. The caller is a pin that is
    inside from the start for what the model is given, and never for what it returns.
    """
    pins: list[list[int]] = [[] for _ in blocks.members]
    inside: list[int] = []
    total: list[int] = []
    size: list[tuple[float, float]] = []

    def add(names: tuple[str, ...], given: bool, returned: bool, forward: float, backward: float) -> None:
        met = sorted({blocks.home[name] for name in names})
        if len(met) + given + returned < 2:
            return
        for block in met:
            pins[block].append(len(size))
        inside.append(int(given))
        total.append(len(met) + given + returned)
        size.append((forward, backward))

    for name, output_bytes, gradient_bytes, readers, is_output in costs.values:
        made = name in blocks.home
        add((name, *readers) if made else readers, not made, is_output, output_bytes, gradient_bytes)
    for exchange in costs.exchanges:
        add(exchange.nodes, False, False, 0.0, exchange.output_bytes)
    sizes = np.array(size, np.float64).reshape(-1, 2)
    return kernels.live_bytes(
        parent, last, *build_csr(pins), np.array(inside, np.int32), np.array(total, np.int32), sizes
    )
