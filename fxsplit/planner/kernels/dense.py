"""The solver for small lattices as loops, for a process with compiled kernels.

It takes a third of the time of the numpy solver in planner/search/dense.py: 2.3 ms against 5.7 for ResNet-50 on 8
devices, 3.7 against 17 with replicas.
"""

from __future__ import annotations

import numpy as np

from fxsplit.planner.kernels.separable import SLACK
from fxsplit.planner.kernels.tables import IDLE, Bools, Floats, Ints, Tables


def best_chains(
    t: Tables, below: Bools, needs: Floats, shared: Floats, rate: Floats, upper: float
) -> tuple[Floats, Ints, Ints]:
    """Find, for every configuration and state, the best chain of stages with all loads below `upper` (ms).

        best(q, I) = min over moves (p -> q) and states J inside I of max(best(p, J), load(J, I)), first of equals

    This is PipeDream's dynamic programme (Narayanan et al. 2019), over ideals.

    - below: bool [states, states], whether a stage may lead from J to I
    - needs: [states, states], additional bytes that the stage holds, or empty
    - shared: [states, states], bytes that the stage pays for in addition, at `rate` [kinds] ms per byte, or empty

    Returns best, origin and via, all [configurations, states]: the slowest load, the position of the state at which the
    last stage starts, and its move; -1 if there is no chain.
    """
    work, start, end, start_floor, end_floor = t.work, t.start, t.end, t.start_floor, t.end_floor
    space_start, space_end, capacity = t.space_start, t.space_end, t.capacity
    launch, hosted = t.launch, t.launch.size > 0
    allowed, moves, done, left = t.allowed, t.moves, t.done, t.left
    ban_ptr, banned = t.bans.pointer, t.bans.ends
    n = work.size
    best = np.full((done.size, n), np.inf)
    origin = np.full((done.size, n), -1, np.int32)
    via = np.full((done.size, n), -1, np.int32)
    # The empty chain has no load, so the first stage's load becomes the slowest.
    best[0, 0] = -np.inf
    origin[0, 0] = 0
    starts = np.empty(n, np.int32)
    for m in range(moves.shape[0]):
        a, b, kind = moves[m, 0], moves[m, 1], moves[m, 2]
        if kind == IDLE:
            for i in range(n):
                if best[a, i] < upper and allowed[b, i] and best[a, i] < best[b, i]:
                    best[b, i], origin[b, i], via[b, i] = best[a, i], i, m
            continue
        count = 0
        # Collect the starts from which the remaining devices can finish in time, once for all ends.
        for j in range(n):
            if best[a, j] < upper and (upper == np.inf or work[n - 1] - work[j] <= upper * left[a] * SLACK):
                starts[count] = j
                count += 1
        if count == 0:
            continue
        for i in range(n):
            if not allowed[b, i]:
                continue
            # Skip ends that the used devices cannot reach, or from which the remaining devices cannot finish.
            if upper < np.inf:
                least, most = work[n - 1] - upper * left[b] * SLACK, upper * done[b] * SLACK
                if work[i] < least or work[i] > most:
                    continue
            # Strictly better only: of equal chains keep the first, as the numpy solver does.
            value, where = min(upper, best[b, i]), -1
            for c in range(count):
                j = starts[c]
                if not below[j, i]:
                    continue
                space = space_end[kind, i] - space_start[kind, j]
                if needs.size:
                    space = space + needs[j, i]
                if not space <= capacity[kind]:
                    continue
                load = max(max(end[kind, i] - start[kind, j], start_floor[kind, j]), end_floor[kind, i])
                if shared.size:
                    load = load + rate[kind] * shared[j, i]
                if hosted:
                    load = max(load, launch[kind, i] - launch[kind, j])
                load = max(load, best[a, j])
                if load < value:
                    fits = True
                    if banned.size:
                        for e in range(ban_ptr[kind * n + j], ban_ptr[kind * n + j + 1]):
                            fits = fits and banned[e] != i
                    if fits:
                        value, where = load, j
            if where >= 0:
                best[b, i], origin[b, i], via[b, i] = value, where, m
    return best, origin, via
