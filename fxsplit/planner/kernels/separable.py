"""The kernels of the partitioner where a stage's load separates into what its start and what its end contribute.

A stage is the difference of two ideals J < I, on some devices; which, and what that costs, is called a move:

    load(J, I) = max(end(I) - start(J), start_floor(J), end_floor(I))

So among all J below I only the largest start matters. It is carried along the lattice's edges, which costs O(edges) a
move in place of O(pairs of ideals). Where memory binds too, short Pareto lists of (start, memory) take its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # compiled for the dtypes that fxsplit.planner.kernels states
SLACK = 1.0 + 1e-9
"""For comparing sums of work that were added up in another order."""


def reach(
    in_ptr: Array,
    in_from: Array,
    work: Array,
    start: Array,
    end: Array,
    start_floor: Array,
    end_floor: Array,
    allowed: Array,
    moves: Array,
    done: Array,
    left: Array,
    may_idle: bool,
    threshold: float,
    steps: int,
) -> Any:
    """Decide which ideals end a chain of stages whose every load is at most `threshold`.

    in_ptr, in_from: the ideals just below each ideal, CSR int32. work: float64 [ideals], what sums over nodes.
    start, end, start_floor, end_floor: float64 [kinds, ideals]. allowed: bool [configurations, ideals].
    moves: int32 [moves, 3] of (from, to, kind), in an order in which a configuration is complete before it is left.
    done, left: float64 [configurations], how much work the devices used so far, and those not used, do in one unit of
    load at most; a chain cannot be in a configuration where there is more than that.

    Returns, per configuration and ideal, the ideal at which the last stage starts and the move it is: int32, -1 where
    there is no chain; and how many steps that took: with more than `steps` it stops, and the tables say nothing. Of
    several chains the one with the smaller slowest load is kept, among those looked at: so a chain under the threshold
    is often the best there is.
    """
    n = in_ptr.size - 1
    origin = np.full((done.size, n), -1, np.int32)
    via = np.full((done.size, n), -1, np.int32)
    slowest = np.full((done.size, n), np.inf)
    origin[0, 0] = 0
    slowest[0, 0] = -np.inf
    top = np.empty(n, np.float64)
    best_from = np.empty(n, np.int32)
    first = np.full(done.size, n, np.int32)
    first[0] = 0
    taken = 0
    for m in range(moves.shape[0]):
        a, b, kind = moves[m, 0], moves[m, 1], moves[m, 2]
        taken += n - first[a]
        if first[a] >= n or taken > steps:
            continue
        most, least = threshold * done[b] * SLACK, work[n - 1] - threshold * left[b] * SLACK
        for i in range(first[a], n):
            top[i] = -np.inf
            if work[i] > most:
                continue
            best = -np.inf
            where = -1
            for e in range(in_ptr[i], in_ptr[i + 1]):
                j = in_from[e]
                if j >= first[a] and top[j] > best:
                    best = top[j]
                    where = best_from[j]
            own = origin[a, i] >= 0 and start_floor[kind, i] <= threshold and start[kind, i] > best
            if own and may_idle:
                best, where = start[kind, i], i
            if best > -np.inf and work[i] >= least and allowed[b, i]:
                load = max(end[kind, i] - best, end_floor[kind, i], start_floor[kind, where])
                if load <= threshold and max(load, slowest[a, where]) < slowest[b, i]:
                    slowest[b, i] = max(load, slowest[a, where])
                    origin[b, i], via[b, i] = where, m
                    first[b] = min(first[b], i)
            if own and not may_idle:
                best, where = start[kind, i], i
            top[i], best_from[i] = best, where
    return origin, via, taken


def reach_bounded(
    in_ptr: Array,
    in_from: Array,
    work: Array,
    start: Array,
    end: Array,
    start_floor: Array,
    end_floor: Array,
    allowed: Array,
    moves: Array,
    done: Array,
    left: Array,
    may_idle: bool,
    threshold: float,
    steps: int,
    space_start: Array,
    space_end: Array,
    space_low: Array,
    capacity: Array,
) -> Any:
    """Decide the same where every stage must also fit: space_end(I) - space_start(J) <= capacity.

    space_start, space_end, space_low: float64 [kinds, ideals]; the last is the part of space_end that only grows.
    capacity: float64 [kinds]. The other arguments and the result are those of `reach`.
    """
    n = in_ptr.size - 1
    origin = np.full((done.size, n), -1, np.int32)
    via = np.full((done.size, n), -1, np.int32)
    slowest = np.full((done.size, n), np.inf)
    origin[0, 0] = 0
    slowest[0, 0] = -np.inf
    taken = 0
    time, space, where = np.empty(n + 1, np.float64), np.empty(n + 1, np.float64), np.empty(n + 1, np.int32)

    def insert(t: float, s: float, j: int, size: int) -> int:
        """Add an entry to the Pareto list of `size` entries, largest values best; return its new size."""
        for p in range(size):
            if time[p] >= t and space[p] >= s:
                return size
        kept = 0
        for p in range(size):
            if not (t >= time[p] and s >= space[p]):
                time[kept], space[kept], where[kept] = time[p], space[p], where[p]
                kept += 1
        time[kept], space[kept], where[kept] = t, s, j
        return kept + 1

    for m in range(moves.shape[0]):
        a, b, kind = moves[m, 0], moves[m, 1], moves[m, 2]
        most, least = threshold * done[b] * SLACK, work[n - 1] - threshold * left[b] * SLACK
        begin = np.zeros(n + 1, np.int64)
        pool_time, pool_space = np.empty(2 * n + 16, np.float64), np.empty(2 * n + 16, np.float64)
        pool_from = np.empty(2 * n + 16, np.int32)
        count = 0
        for i in range(n):
            size = 0
            taken += 1
            if taken > steps:
                return origin, via, taken
            if work[i] <= most:
                for e in range(in_ptr[i], in_ptr[i + 1]):
                    taken += begin[in_from[e] + 1] - begin[in_from[e]]
                    for k in range(begin[in_from[e]], begin[in_from[e] + 1]):
                        if space_low[kind, i] - pool_space[k] <= capacity[kind]:
                            size = insert(pool_time[k], pool_space[k], pool_from[k], size)
                own = origin[a, i] >= 0 and start_floor[kind, i] <= threshold
                if own and may_idle:
                    size = insert(start[kind, i], space_start[kind, i], i, size)
                if work[i] >= least and allowed[b, i]:
                    for p in range(size):
                        load = max(end[kind, i] - time[p], end_floor[kind, i], start_floor[kind, where[p]])
                        fits = space_end[kind, i] - space[p] <= capacity[kind]
                        if fits and load <= threshold and max(load, slowest[a, where[p]]) < slowest[b, i]:
                            slowest[b, i] = max(load, slowest[a, where[p]])
                            origin[b, i], via[b, i] = where[p], m
                if own and not may_idle:
                    size = insert(start[kind, i], space_start[kind, i], i, size)
            if count + size > pool_time.size:
                longer = np.empty(count + size, np.float64)
                pool_time, pool_space = np.concatenate((pool_time, longer)), np.concatenate((pool_space, longer))
                pool_from = np.concatenate((pool_from, np.empty(count + size, np.int32)))
            for p in range(size):
                pool_time[count], pool_space[count], pool_from[count] = time[p], space[p], where[p]
                count += 1
            begin[i + 1] = count
    return origin, via, taken
