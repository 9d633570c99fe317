"""The kernel of the partitioner: which chains of stages stay under a threshold.

A stage is the difference of two ideals J < I. Both its load and its memory separate into what J and what I contribute:

    load(J, I) = end(I) - start(J),  end(I) = f(I) . w,  start(J) = f(J) . u,

with f an ideal's features (prefix sums and live bytes) and w, u a stage's coefficients. So among all J below I, only
those matter that no other J' below I beats in both starts. They are carried along the lattice's edges as short Pareto
lists, which costs O(edges x stages) a test in place of O(pairs of ideals x stages).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from fxsplit.kernels.arrays import grown

Array = Any  # numba specialises on the dtypes, which fxsplit.kernels states


@njit(cache=True)
def _dot(row: Array, weight: Array) -> float:
    """Return the scalar product of two short vectors."""
    total = 0.0
    for i in range(row.size):
        total += row[i] * weight[i]
    return total


@njit(cache=True)
def _insert(time: Array, space: Array, origin: Array, count: int, t: float, m: float, j: int) -> int:
    """Add (t, m, j) to a Pareto list of `count` entries, largest values best; return the new count."""
    for i in range(count):
        if time[i] >= t and space[i] >= m:
            return count
    kept = 0
    for i in range(count):
        if not (t >= time[i] and m >= space[i]):
            time[kept], space[kept], origin[kept] = time[i], space[i], origin[i]
            kept += 1
    time[kept], space[kept], origin[kept] = t, m, j
    return kept + 1


@njit(cache=True)
def reach(
    in_ptr: Array,
    in_from: Array,
    features: Array,
    load: Array,
    memory: Array,
    capacity: Array,
    allowed: Array,
    work: Array,
    later: Array,
    threshold: float,
    may_idle: bool,
) -> Any:
    """Decide, for stage after stage, which ideals end a chain whose every stage has load <= threshold and fits.

    in_ptr, in_from: the ideals just below each ideal, CSR int32.
    features: float64 [ideals, features], prefix sums first.
    load, memory: float64 [stages, 3, features], the coefficients of a stage's end, start, and lower bound of its end
        (the part that only grows with the ideal).
    capacity: float64 [stages], the memory of each stage's device.
    allowed: bool [stages + 1, ideals], whether the chain may be cut at an ideal after that many stages.
    work: float64 [ideals], a quantity that sums over nodes; later: float64 [stages], how much of it all stages after
        each can do for one unit of load. A cut that leaves more than they can do under the threshold leads nowhere.
    may_idle: whether a stage may be empty.

    Returns choice int32 [stages, ideals], the ideal at which the stage that ends there starts (-1 where none does),
    and the smallest load above the threshold that was met, below which no other answer is possible.
    """
    stages, n = load.shape[0], in_ptr.size - 1
    choice = np.full((stages, n), -1, np.int32)
    following = np.inf
    for stage in range(stages):
        # Where no capacity binds, memory is left out and every list has one entry.
        bounded = capacity[stage] < np.inf
        pool_time = np.empty(2 * n + 16, np.float64)
        pool_space = np.empty(2 * n + 16, np.float64)
        pool_from = np.empty(2 * n + 16, np.int32)
        first = np.zeros(n + 1, np.int64)
        count = 0
        room = 64
        time = np.empty(room, np.float64)
        space = np.empty(room, np.float64)
        origin = np.empty(room, np.int32)
        for i in range(n):
            row = features[i]
            least_load = _dot(row, load[stage, 2])
            least_memory = _dot(row, memory[stage, 2]) if bounded else 0.0
            size = 0
            for e in range(in_ptr[i], in_ptr[i + 1]):
                below = in_from[e]
                for k in range(first[below], first[below + 1]):
                    if least_load - pool_time[k] > threshold:
                        following = min(following, least_load - pool_time[k])
                        continue
                    if bounded and least_memory - pool_space[k] > capacity[stage]:
                        continue
                    if size + 2 > room:  # one for this entry, one for the ideal's own
                        room *= 2
                        time, space, origin = grown(time, room), grown(space, room), grown(origin, room)
                    size = _insert(time, space, origin, size, pool_time[k], pool_space[k], pool_from[k])
            starts = i == 0 if stage == 0 else choice[stage - 1, i] >= 0
            if starts and may_idle:
                start_space = _dot(row, memory[stage, 1]) if bounded else 0.0
                size = _insert(time, space, origin, size, _dot(row, load[stage, 1]), start_space, i)
            behind = 0.0
            if later[stage] > 0.0:
                behind = (work[n - 1] - work[i]) / later[stage] * (1.0 - 1e-12)
            if size > 0 and behind > threshold:
                following = min(following, behind)
            elif allowed[stage + 1, i] and size > 0:
                end_load = _dot(row, load[stage, 0])
                end_memory = _dot(row, memory[stage, 0]) if bounded else 0.0
                best = -np.inf
                for k in range(size):
                    if bounded and end_memory - space[k] > capacity[stage]:
                        continue
                    if end_load - time[k] > threshold:
                        following = min(following, end_load - time[k])
                    elif time[k] > best:
                        best = time[k]
                        choice[stage, i] = origin[k]
            if starts and not may_idle:
                start_space = _dot(row, memory[stage, 1]) if bounded else 0.0
                size = _insert(time, space, origin, size, _dot(row, load[stage, 1]), start_space, i)
            if count + size > pool_time.size:
                longer = 2 * (count + size)
                pool_time, pool_space = grown(pool_time, longer), grown(pool_space, longer)
                pool_from = grown(pool_from, longer)
            for k in range(size):
                pool_time[count], pool_space[count], pool_from[count] = time[k], space[k], origin[k]
                count += 1
            first[i + 1] = count
    return choice, following
