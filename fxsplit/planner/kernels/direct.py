"""The kernel of the partitioner where a stage pays for each tensor that it shares with another stage.

A stage S = I - J pays for a tensor if some of its pins (the nodes that make or read it) lie in S and some outside.
That does not separate into J and I. So from each reachable J a walk adds nodes in ascending order, which meets every
larger ideal once, and keeps count of what is paid. Two things keep walks short:

- bounds: what is paid for good (tensors with pins in J and in S) only grows, and no I costs less than the cheapest
  ideal above it allows
- closure: once I holds every pin of every tensor that is live at J, load(J, I) = end(I) - start(J) for all larger I.
  J's start is left there, and carried on along the lattice's edges, as in `separable`
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fxsplit.planner.kernels.separable import SLACK

Array = Any  # compiled for the dtypes that fxsplit.planner.kernels states


def cheapest_above(pointer: Array, child: Array, end: Array) -> Any:
    """Return, per kind and ideal, the least `end` of the ideal and of all larger ones: float64 [kinds, ideals]."""
    least = end.copy()
    for i in range(pointer.size - 2, -1, -1):
        for e in range(pointer[i], pointer[i + 1]):
            for k in range(end.shape[0]):
                least[k, i] = min(least[k, i], least[k, child[e]])
    return least


def reach(
    parent: Array,
    last: Array,
    pointer: Array,
    node: Array,
    child: Array,
    in_ptr: Array,
    in_from: Array,
    work: Array,
    busy: Array,
    live: Array,
    least: Array,
    rate: Array,
    space: Array,
    capacity: Array,
    pins_ptr: Array,
    pins: Array,
    total: Array,
    size: Array,
    allowed: Array,
    moves: Array,
    left: Array,
    better: Array,
    may_idle: bool,
    closing: bool,
    threshold: float,
    steps: int,
) -> Any:
    """Decide which ideals end a chain of stages whose every load is at most `threshold` and that fit.

    parent, last: the ideals as in `lattice.enumerate_ideals`. pointer, node, child: the edges upward, in_ptr, in_from:
    downward, CSR. work: float64 [ideals]. busy, space: float64 [kinds, ideals], time and memory of all nodes inside;
    capacity: float64 [kinds]. live: float64 [ideals], the sizes of tensors with pins on both sides; rate: float64
    [kinds], time per size; least: `cheapest_above` of busy + rate x live. pins_ptr, pins: the tensors at each node,
    CSR; total: int32 [tensors], their pins; size: float64 [tensors]. allowed: bool [configurations, ideals].
    moves: int32 [moves, 3] of (from, to, kind). left: float64 [configurations], the work that unused devices do in one
    unit of load at most. better: bool [configurations, configurations], whether the first makes the second useless.
    may_idle: whether a stage may be empty, which costs nothing.
    closing: whether to use closures, which look at loads alone and not at memory. With more than `steps` it stops.

    Returns, per configuration and ideal, the ideal at which the last stage starts and the move it is, and how many
    steps it took, as `separable`.
    """
    n, nodes = parent.size, pins_ptr.size - 1
    configurations, kinds = left.size, rate.size
    origin = np.full((configurations, n), -1, np.int32)
    via = np.full((configurations, n), -1, np.int32)
    slowest = np.full((configurations, n), np.inf)
    origin[0, 0] = 0
    slowest[0, 0] = -np.inf
    top = np.full((moves.shape[0], n), -np.inf)
    top_from = np.full((moves.shape[0], n), -1, np.int32)
    inside = np.zeros(total.size, np.int32)  # pins in J
    added = np.zeros(total.size, np.int32)  # pins in S
    path = np.zeros(nodes + 1, np.int32)
    depth = 0
    open_at_start = 0
    at = np.zeros(nodes + 2, np.int32)
    cursor = np.zeros(nodes + 2, np.int64)
    entered = np.zeros(nodes + 2, np.int32)
    active = np.zeros(moves.shape[0], np.bool_)
    usable = np.zeros(kinds, np.bool_)
    alive = np.zeros((nodes + 2, kinds), np.bool_)
    taken = 0
    for j in range(n):
        taken += 1
        if taken > steps:
            break
        if j > 0:
            while path[depth] != parent[j]:
                for e in range(pins_ptr[last[path[depth]]], pins_ptr[last[path[depth]] + 1]):
                    t = pins[e]
                    open_at_start += int(inside[t] == total[t]) - int(inside[t] == 1)
                    inside[t] -= 1
                depth -= 1
            for e in range(pins_ptr[last[j]], pins_ptr[last[j] + 1]):
                t = pins[e]
                inside[t] += 1
                open_at_start += int(inside[t] == 1) - int(inside[t] == total[t])
            depth += 1
            path[depth] = j
        for m in range(moves.shape[0]):
            kind = moves[m, 2]
            for e in range(in_ptr[j], in_ptr[j + 1]):
                if top[m, in_from[e]] > top[m, j]:
                    top[m, j], top_from[m, j] = top[m, in_from[e]], top_from[m, in_from[e]]
            if top[m, j] == -np.inf:
                continue
            if least[kind, j] - top[m, j] > threshold:
                top[m, j] = -np.inf
                continue
            b = moves[m, 1]
            load = busy[kind, j] + rate[kind] * live[j] - top[m, j]
            chain = max(load, slowest[moves[m, 0], top_from[m, j]])
            if load <= threshold and chain < slowest[b, j] and allowed[b, j]:
                slowest[b, j], origin[b, j], via[b, j] = chain, top_from[m, j], m
        if may_idle:
            for m in range(moves.shape[0]):
                a, b = moves[m, 0], moves[m, 1]
                if origin[a, j] >= 0 and allowed[b, j] and max(0.0, slowest[a, j]) < slowest[b, j]:
                    slowest[b, j], origin[b, j], via[b, j] = max(0.0, slowest[a, j]), j, m
        some = False
        usable[:] = False
        for m in range(moves.shape[0]):
            a = moves[m, 0]
            active[m] = origin[a, j] >= 0 and work[n - 1] - work[j] <= threshold * left[a] * SLACK
            if active[m]:
                for q in range(configurations):
                    if better[q, a] and origin[q, j] >= 0:
                        active[m] = False
            if active[m]:
                some = True
                usable[moves[m, 2]] = True
        if not some:
            continue
        if open_at_start == 0 and closing:
            for m in range(moves.shape[0]):
                if active[m] and busy[moves[m, 2], j] > top[m, j]:
                    top[m, j], top_from[m, j] = busy[moves[m, 2], j], j
            continue
        paid, fixed, open_now = 0.0, 0.0, open_at_start
        level = 0
        at[0], cursor[0], entered[0] = j, pointer[j], -1
        for k in range(kinds):
            alive[0, k] = usable[k]
        while level >= 0 and taken <= steps:
            taken += 1
            if cursor[level] >= pointer[at[level] + 1]:
                v = entered[level]
                level -= 1
                if level >= 0:
                    for e in range(pins_ptr[v], pins_ptr[v + 1]):
                        t = pins[e]
                        open_now += int(inside[t] > 0 and inside[t] + added[t] == total[t])
                        paid += size[t] * (int(added[t] == total[t]) - int(added[t] == 1))
                        fixed -= size[t] * int(added[t] == 1 and inside[t] > 0)
                        added[t] -= 1
                continue
            edge = cursor[level]
            cursor[level] += 1
            v = node[edge]
            if v < entered[level]:
                continue
            i = child[edge]
            for e in range(pins_ptr[v], pins_ptr[v + 1]):
                t = pins[e]
                added[t] += 1
                paid += size[t] * (int(added[t] == 1) - int(added[t] == total[t]))
                fixed += size[t] * int(added[t] == 1 and inside[t] > 0)
                open_now -= int(inside[t] > 0 and inside[t] + added[t] == total[t])
            level += 1
            at[level], entered[level] = i, v
            on = False
            for k in range(kinds):
                alive[level, k] = False
                if alive[level - 1, k] and space[k, i] - space[k, j] <= capacity[k]:
                    bound = busy[k, i] - busy[k, j] + rate[k] * fixed
                    other = least[k, i] - busy[k, j] - rate[k] * (live[j] - fixed)
                    alive[level, k] = max(bound, other) * (1.0 - 1e-12) <= threshold
                    on = on or alive[level, k]
            for m in range(moves.shape[0]):
                kind, b = moves[m, 2], moves[m, 1]
                if active[m] and alive[level, kind]:
                    load = busy[kind, i] - busy[kind, j] + rate[kind] * paid
                    chain = max(load, slowest[moves[m, 0], j])
                    if load <= threshold and chain < slowest[b, i] and allowed[b, i]:
                        slowest[b, i], origin[b, i], via[b, i] = chain, j, m
                    start = busy[kind, j] - rate[kind] * live[j]
                    if open_now == 0 and closing and start > top[m, i]:
                        top[m, i], top_from[m, i] = start, j
            descend = on and not (open_now == 0 and closing)
            cursor[level] = pointer[i] if descend else pointer[i + 1]
    return origin, via, taken
