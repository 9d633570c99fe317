"""Kernels for cost models in which the load of a stage is a term of its end minus a term of its start.

A stage is the difference of two ideals J < I, on the devices of a move (see moves.py):

    load(J, I) = max(end(I) - start(J), start_floor(J), end_floor(I))

So among all J below I only the largest start matters. Carry it along the edges of the lattice: each move costs O(edges)
instead of O(pairs of ideals).

    top(I) = max(top(J) for J just below I, start(I) if a chain ends at I)

If memory binds, or hosts launch kernels, carry a short list of (start, memory, launches) instead, without entries that
another entry beats in all three.
"""

from __future__ import annotations

import numpy as np

from fxsplit.planner.kernels.tables import IDLE, Ints, Tables

SLACK = 1.0 + 1e-9
"""Relative tolerance between sums of the same work in a different order."""


def reach(t: Tables, threshold: float, steps: int) -> tuple[Ints, Ints, int]:
    """Find which ideals can be divided into stages that take at most `threshold` ms each, ignoring memory.

    The answer depends on the configuration, the set of devices that these stages have used. Skip a configuration at an
    ideal if its devices cannot have done the ideal's work within `threshold`, or the remaining devices cannot do the
    rest. If an ideal can be divided in several ways, keep the way with the smallest bottleneck that was met. Another
    way may have a smaller one.

    Returns two int32 tables [configurations, ideals]: the ideal at which the last stage starts, and the number of the
    move that adds this stage (-1: the ideal cannot be divided so). Also returns the number of steps: in each the kernel
    takes one ideal under one move. After more than `steps` it stops, and the tables are incomplete.
    """
    # Local names are faster than attributes in the interpreter, which runs small problems.
    in_ptr, in_from, work, allowed, moves = t.in_ptr, t.in_from, t.work, t.allowed, t.moves
    start, end, start_floor, end_floor = t.start, t.end, t.start_floor, t.end_floor
    done, left, may_idle = t.done, t.left, t.may_idle
    n = in_ptr.size - 1
    origin = np.full((done.size, n), -1, np.int32)
    via = np.full((done.size, n), -1, np.int32)
    # The slowest load of the best chain that ends here. Only a better chain replaces it.
    slowest = np.full((done.size, n), np.inf)
    origin[0, 0] = 0
    slowest[0, 0] = -np.inf
    # The largest start that reaches an ideal, and the ideal that it belongs to.
    top = np.empty(n, np.float64)
    best_from = np.empty(n, np.int32)
    # The first ideal that each configuration reaches: skip all smaller numbers.
    first = np.full(done.size, n, np.int32)
    first[0] = 0
    taken = 0
    for m in range(moves.shape[0]):
        a, b, kind = moves[m, 0], moves[m, 1], moves[m, 2]
        taken += n - first[a]
        # No chain reaches the configuration that this move starts from.
        if first[a] >= n or taken > steps:
            continue
        if kind == IDLE:
            for i in range(first[a], n):
                if origin[a, i] >= 0 and allowed[b, i] and slowest[a, i] < slowest[b, i]:
                    slowest[b, i], origin[b, i], via[b, i] = slowest[a, i], i, m
                    first[b] = min(first[b], i)
            continue
        # Above `most` the used devices cannot have done the work; below `least` the others cannot do the rest.
        most, least = threshold * done[b] * SLACK, work[n - 1] - threshold * left[b] * SLACK
        # Subsets have smaller numbers, so one sweep carries the starts through the lattice.
        for i in range(first[a], n):
            top[i] = -np.inf
            if work[i] > most:
                continue
            best = -np.inf
            where = -1
            # The best start among the ideals just below is the best of all ideals below.
            for e in range(in_ptr[i], in_ptr[i + 1]):
                j = in_from[e]
                if j >= first[a] and top[j] > best:
                    best = top[j]
                    where = best_from[j]
            # A stage may start here if a chain ends here. It may also end here only if stages may be empty.
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


def reach_bounded(t: Tables, threshold: float, steps: int) -> tuple[Ints, Ints, int]:
    """Like `reach`, but every stage must also fit in memory, and its host must launch it within `threshold`.

    It carries a list of starts for each ideal. Parameters and results are those of `reach`.
    """
    in_ptr, in_from, work, allowed, moves = t.in_ptr, t.in_from, t.work, t.allowed, t.moves
    start, end, start_floor, end_floor = t.start, t.end, t.start_floor, t.end_floor
    done, left, may_idle = t.done, t.left, t.may_idle
    space_start, space_end, space_low, capacity = t.space_start, t.space_end, t.space_low, t.capacity
    launch, hosted = t.launch, t.launch.size > 0
    edge_far, freed, ban_ptr, banned = t.needs.far, t.needs.freed, t.bans.pointer, t.bans.ends
    needy, banning = freed.size > 0, banned.size > 0
    n = in_ptr.size - 1
    origin = np.full((done.size, n), -1, np.int32)
    via = np.full((done.size, n), -1, np.int32)
    slowest = np.full((done.size, n), np.inf)
    origin[0, 0] = 0
    slowest[0, 0] = -np.inf
    taken = 0
    # The list of the current ideal. An entry has a start, its memory, its ideal (which gives launches and bans), and
    # the largest need of the blocks since.
    time, space, where = np.empty(n + 1, np.float64), np.empty(n + 1, np.float64), np.empty(n + 1, np.int32)
    far = np.zeros(n + 1, np.float64)

    def insert(late: float, room: float, j: int, far_j: float, size: int, kind: int) -> int:
        """Add an entry to the list of `size` entries unless another entry beats it in all; return the new size."""
        row = kind * n
        for p in range(size):
            better = time[p] >= late and space[p] >= room and far[p] <= far_j
            if better and hosted:
                better = launch[kind, where[p]] >= launch[kind, j]
            # A start with banned ends replaces no other start. It reaches this ideal itself over every path.
            if better and banning:
                better = where[p] == j or ban_ptr[row + where[p]] == ban_ptr[row + where[p] + 1]
            if better:
                return size
        alone = banning and ban_ptr[row + j] < ban_ptr[row + j + 1]
        # Remove the entries that the new entry beats in all.
        kept = 0
        for p in range(size):
            beaten = late >= time[p] and room >= space[p] and far_j <= far[p] and not alone
            if not beaten or (hosted and launch[kind, j] < launch[kind, where[p]]):
                time[kept], space[kept], where[kept], far[kept] = time[p], space[p], where[p], far[p]
                kept += 1
        time[kept], space[kept], where[kept], far[kept] = late, room, j, far_j
        return kept + 1

    def is_banned(kind: int, j: int, i: int) -> bool:
        """Return whether the stage from ideal j to ideal i is banned."""
        found = False
        for e in range(ban_ptr[kind * n + j], ban_ptr[kind * n + j + 1]):
            found = found or banned[e] == i
        return found

    for m in range(moves.shape[0]):
        a, b, kind = moves[m, 0], moves[m, 1], moves[m, 2]
        if kind == IDLE:
            taken += n
            for i in range(n):
                if origin[a, i] >= 0 and allowed[b, i] and slowest[a, i] < slowest[b, i]:
                    slowest[b, i], origin[b, i], via[b, i] = slowest[a, i], i, m
            continue
        most, least = threshold * done[b] * SLACK, work[n - 1] - threshold * left[b] * SLACK
        begin = np.zeros(n + 1, np.int64)
        # The lists of all ideals lie in one pool, one after the other. It grows as needed.
        pool_time, pool_space = np.empty(2 * n + 16, np.float64), np.empty(2 * n + 16, np.float64)
        pool_from = np.empty(2 * n + 16, np.int32)
        pool_far = np.zeros(2 * n + 16, np.float64)
        count = 0
        for i in range(n):
            size = 0
            taken += 1
            if taken > steps:
                return origin, via, taken
            if work[i] <= most:
                for e in range(in_ptr[i], in_ptr[i + 1]):
                    # Each entry is work, so each counts as a step.
                    taken += begin[in_from[e] + 1] - begin[in_from[e]]
                    # Drop an entry if even its monotonic part exceeds the memory: no larger ideal fits either.
                    for k in range(begin[in_from[e]], begin[in_from[e] + 1]):
                        # Launches never shrink either.
                        if hosted and launch[kind, i] - launch[kind, pool_from[k]] > threshold:
                            continue
                        if space_low[kind, i] - pool_space[k] <= capacity[kind]:
                            most_far = max(pool_far[k], edge_far[e]) if needy else 0.0
                            size = insert(pool_time[k], pool_space[k], pool_from[k], most_far, size, kind)
                own = origin[a, i] >= 0 and start_floor[kind, i] <= threshold
                if own and may_idle:
                    size = insert(start[kind, i], space_start[kind, i], i, 0.0, size, kind)
                if work[i] >= least and allowed[b, i]:
                    for p in range(size):
                        load = max(end[kind, i] - time[p], end_floor[kind, i], start_floor[kind, where[p]])
                        if hosted:
                            load = max(load, launch[kind, i] - launch[kind, where[p]])
                        room = space_end[kind, i] - space[p]
                        if needy:
                            room += max(far[p] - freed[i], 0.0)
                        fits = room <= capacity[kind] and not (banning and is_banned(kind, where[p], i))
                        if fits and load <= threshold and max(load, slowest[a, where[p]]) < slowest[b, i]:
                            slowest[b, i] = max(load, slowest[a, where[p]])
                            origin[b, i], via[b, i] = where[p], m
                if own and not may_idle:
                    size = insert(start[kind, i], space_start[kind, i], i, 0.0, size, kind)
            # Grow by the present and the needed size, so that copies are rare.
            if count + size > pool_time.size:
                longer = np.empty(count + size, np.float64)
                pool_time, pool_space = np.concatenate((pool_time, longer)), np.concatenate((pool_space, longer))
                pool_far = np.concatenate((pool_far, longer))
                pool_from = np.concatenate((pool_from, np.empty(count + size, np.int32)))
            for p in range(size):
                pool_time[count], pool_space[count] = time[p], space[p]
                pool_from[count], pool_far[count] = where[p], far[p]
                count += 1
            begin[i + 1] = count
    return origin, via, taken
