"""The kernel of the planner for small lattices: its numpy loops once more, for a process whose kernels are compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from fxsplit.planner.kernels.separable import SLACK

Array = Any  # compiled for the dtypes that fxsplit.planner.kernels states


def best_chains(
    below: Array,
    work: Array,
    start: Array,
    end: Array,
    start_floor: Array,
    end_floor: Array,
    space_start: Array,
    space_end: Array,
    capacity: Array,
    shared: Array,
    rate: Array,
    allowed: Array,
    moves: Array,
    done: Array,
    left: Array,
    upper: float,
) -> Any:
    """Find the best chain of stages to every state, of those with all loads below `upper`.

    best(q, I) = min over moves (p -> q) and states J inside I of max(best(p, J), load(J, I)), ties to the first.

    below: bool [states, states], whether J may be where a stage starts that ends with I. shared: float64 [states,
    states] bytes that the stage also pays for at `rate`, float64 [kinds] (empty: none). All other arguments are those
    of `separable.reach_bounded`. Returns best, float64, and origin and via, int32 (states by position, -1 for none),
    all [configurations, states].
    """
    n = work.size
    best = np.full((done.size, n), np.inf)
    origin = np.full((done.size, n), -1, np.int32)
    via = np.full((done.size, n), -1, np.int32)
    best[0, 0] = -np.inf
    origin[0, 0] = 0
    starts = np.empty(n, np.int32)
    for m in range(moves.shape[0]):
        a, b, kind = moves[m, 0], moves[m, 1], moves[m, 2]
        count = 0
        for j in range(n):
            if best[a, j] < upper and (upper == np.inf or work[n - 1] - work[j] <= upper * left[a] * SLACK):
                starts[count] = j
                count += 1
        if count == 0:
            continue
        for i in range(n):
            if not allowed[b, i]:
                continue
            if upper < np.inf:
                least, most = work[n - 1] - upper * left[b] * SLACK, upper * done[b] * SLACK
                if work[i] < least or work[i] > most:
                    continue
            value, where = min(upper, best[b, i]), -1
            for c in range(count):
                j = starts[c]
                if not below[j, i] or not space_end[kind, i] - space_start[kind, j] <= capacity[kind]:
                    continue
                load = max(max(end[kind, i] - start[kind, j], start_floor[kind, j]), end_floor[kind, i])
                if shared.size:
                    load = load + rate[kind] * shared[j, i]
                load = max(load, best[a, j])
                if load < value:
                    value, where = load, j
            if where >= 0:
                best[b, i], origin[b, i], via[b, i] = value, where, m
    return best, origin, via
