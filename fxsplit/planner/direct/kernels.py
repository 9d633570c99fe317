"""The kernel for the cost model in which a stage pays for each tensor that it shares with another stage.

A stage S = I - J pays for a tensor if some of its pins (the nodes that make or read it) lie in S and some outside.
That does not separate into what J and what I contribute. So from each J that ends a chain a walk adds nodes in
ascending order, which meets every larger ideal once, and keeps count of what is paid. Two things keep walks short:

- bounds: what S pays for tensors with pins in J is paid however much S grows, and no larger ideal costs less than the
  cheapest one above it
- closure: as soon as I holds every pin of every tensor that is live at J, load(J, I) = end(I) - start(J) for all larger
  I. The start of J is left at that I, and carried on along the edges of the lattice, as in `separable`
"""

from __future__ import annotations

import numpy as np

from fxsplit.planner.kernels.separable import SLACK
from fxsplit.planner.kernels.tables import IDLE, Floats, Ints, Lattice, Tables, Tensors


def cheapest_above(pointer: Ints, child: Ints, end: Floats) -> Floats:
    """Return, per kind and ideal, the least `end` of the ideal and of all larger ones: float64 [kinds, ideals]."""
    least = end.copy()
    # From the full ideal down: every larger ideal is done before.
    for i in range(pointer.size - 2, -1, -1):
        for e in range(pointer[i], pointer[i + 1]):
            for k in range(end.shape[0]):
                least[k, i] = min(least[k, i], least[k, child[e]])
    return least


def reach(
    lattice: Lattice, t: Tables, shared: Tensors, closing: bool, threshold: float, steps: int
) -> tuple[Ints, Ints, int]:
    """Decide which ideals end a chain of stages whose every load is at most `threshold` and that fit.

    `t.end` is the time of all nodes inside an ideal, and `t.space_low` their memory. closing: whether to use closures,
    which look at what devices do alone, neither at memory nor at launches. With more than `steps` it stops.

    Returns, per configuration and ideal, the ideal at which the last stage starts and the move it is, and how many
    steps it took, as `separable.reach`.
    """
    parent, last, pointer, node, child = lattice
    pins_ptr, pins, total, size, rate, live, least, better = shared
    in_ptr, in_from, work, busy, space, capacity = t.in_ptr, t.in_from, t.work, t.end, t.space_low, t.capacity
    allowed, moves, left, may_idle = t.allowed, t.moves, t.left, t.may_idle
    launch, hosted = t.launch, t.launch.size > 0
    n, nodes = parent.size, pins_ptr.size - 1
    configurations, kinds = left.size, rate.size
    origin = np.full((configurations, n), -1, np.int32)
    via = np.full((configurations, n), -1, np.int32)
    # The smallest slowest load of a chain that ends here. A later chain replaces it only if it is better.
    slowest = np.full((configurations, n), np.inf)
    origin[0, 0] = 0
    slowest[0, 0] = -np.inf
    # The best start left at a closure below, by move, and the ideal J that it belongs to.
    top = np.full((moves.shape[0], n), -np.inf)
    top_from = np.full((moves.shape[0], n), -1, np.int32)
    inside = np.zeros(total.size, np.int32)  # pins in J
    added = np.zeros(total.size, np.int32)  # pins in S
    # The ideals on the way to J in the tree of the enumeration, each one block larger.
    path = np.zeros(nodes + 1, np.int32)
    depth = 0
    # How many tensors are live at J. A closure is where all of them have every pin inside.
    open_at_start = 0
    # The walk from J: at each level the ideal, the next edge to try, and the node that was added last.
    at = np.zeros(nodes + 2, np.int32)
    cursor = np.zeros(nodes + 2, np.int64)
    entered = np.zeros(nodes + 2, np.int32)
    active = np.zeros(moves.shape[0], np.bool_)
    usable = np.zeros(kinds, np.bool_)
    # Kinds of moves that are still below the threshold at each level: a larger stage only revives none.
    alive = np.zeros((nodes + 2, kinds), np.bool_)
    taken = 0
    for j in range(n):
        taken += 1
        if taken > steps:
            break
        # Move the counts of pins inside J from the last J to this one, along the tree of the enumeration.
        if j > 0:
            while path[depth] != parent[j]:
                for e in range(pins_ptr[last[path[depth]]], pins_ptr[last[path[depth]] + 1]):
                    x = pins[e]
                    open_at_start += int(inside[x] == total[x]) - int(inside[x] == 1)
                    inside[x] -= 1
                depth -= 1
            for e in range(pins_ptr[last[j]], pins_ptr[last[j] + 1]):
                x = pins[e]
                inside[x] += 1
                open_at_start += int(inside[x] == 1) - int(inside[x] == total[x])
            depth += 1
            path[depth] = j
        # End stages here whose starts were left at a closure below: their loads separate.
        for m in range(moves.shape[0]):
            kind = moves[m, 2]
            if kind == IDLE:
                a, b = moves[m, 0], moves[m, 1]
                if origin[a, j] >= 0 and allowed[b, j] and slowest[a, j] < slowest[b, j]:
                    slowest[b, j], origin[b, j], via[b, j] = slowest[a, j], j, m
                continue
            for e in range(in_ptr[j], in_ptr[j + 1]):
                if top[m, in_from[e]] > top[m, j]:
                    top[m, j], top_from[m, j] = top[m, in_from[e]], top_from[m, in_from[e]]
            if top[m, j] == -np.inf:
                continue
            # No larger ideal can end this stage in time, so the start is not carried on.
            if least[kind, j] - top[m, j] > threshold:
                top[m, j] = -np.inf
                continue
            b = moves[m, 1]
            load = busy[kind, j] + rate[kind] * live[j] - top[m, j]
            chain = max(load, slowest[moves[m, 0], top_from[m, j]])
            if load <= threshold and chain < slowest[b, j] and allowed[b, j]:
                slowest[b, j], origin[b, j], via[b, j] = chain, top_from[m, j], m
        # An empty stage ends where it starts, and takes no time.
        if may_idle:
            for m in range(moves.shape[0]):
                a, b = moves[m, 0], moves[m, 1]
                if (
                    moves[m, 2] != IDLE
                    and origin[a, j] >= 0
                    and allowed[b, j]
                    and max(0.0, slowest[a, j]) < slowest[b, j]
                ):
                    slowest[b, j], origin[b, j], via[b, j] = max(0.0, slowest[a, j]), j, m
        # Stages start here for the moves that some chain can take, unless fewer devices got as far.
        some = False
        usable[:] = False
        for m in range(moves.shape[0]):
            a = moves[m, 0]
            active[m] = (
                moves[m, 2] != IDLE and origin[a, j] >= 0 and work[n - 1] - work[j] <= threshold * left[a] * SLACK
            )
            if active[m]:
                for q in range(configurations):
                    if better[q, a] and origin[q, j] >= 0:
                        active[m] = False
            if active[m]:
                some = True
                usable[moves[m, 2]] = True
        if not some:
            continue
        # No tensor is live at J, so J is a closure by itself and needs no walk.
        if open_at_start == 0 and closing:
            for m in range(moves.shape[0]):
                if active[m] and busy[moves[m, 2], j] > top[m, j]:
                    top[m, j], top_from[m, j] = busy[moves[m, 2], j], j
            continue
        # `paid` is what S pays for now, `fixed` what it pays for however much it grows: tensors with pins in J.
        paid, fixed, open_now = 0.0, 0.0, open_at_start
        level = 0
        at[0], cursor[0], entered[0] = j, pointer[j], -1
        for k in range(kinds):
            alive[0, k] = usable[k]
        while level >= 0 and taken <= steps:
            taken += 1
            # All larger ideals have been visited: take the last node out of the stage again.
            if cursor[level] >= pointer[at[level] + 1]:
                v = entered[level]
                level -= 1
                if level >= 0:
                    for e in range(pins_ptr[v], pins_ptr[v + 1]):
                        x = pins[e]
                        open_now += int(inside[x] > 0 and inside[x] + added[x] == total[x])
                        paid += size[x] * (int(added[x] == total[x]) - int(added[x] == 1))
                        fixed -= size[x] * int(added[x] == 1 and inside[x] > 0)
                        added[x] -= 1
                continue
            edge = cursor[level]
            cursor[level] += 1
            v = node[edge]
            # Nodes join in ascending order alone, so that each larger ideal is met once.
            if v < entered[level]:
                continue
            i = child[edge]
            for e in range(pins_ptr[v], pins_ptr[v + 1]):
                x = pins[e]
                added[x] += 1
                # The first pin in S makes it pay for a tensor, and all pins inside S end that.
                paid += size[x] * (int(added[x] == 1) - int(added[x] == total[x]))
                fixed += size[x] * int(added[x] == 1 and inside[x] > 0)
                open_now -= int(inside[x] > 0 and inside[x] + added[x] == total[x])
            level += 1
            at[level], entered[level] = i, v
            # Go on only with kinds of moves under which this stage, or a larger one, may stay below the threshold.
            on = False
            for k in range(kinds):
                alive[level, k] = False
                if alive[level - 1, k] and space[k, i] - space[k, j] <= capacity[k]:
                    # Two bounds of this and every larger stage: what is fixed, and the cheapest end above.
                    bound = busy[k, i] - busy[k, j] + rate[k] * fixed
                    other = least[k, i] - busy[k, j] - rate[k] * (live[j] - fixed)
                    if hosted:
                        bound = max(bound, launch[k, i] - launch[k, j])
                    alive[level, k] = max(bound, other) * (1.0 - 1e-12) <= threshold
                    on = on or alive[level, k]
            for m in range(moves.shape[0]):
                kind, b = moves[m, 2], moves[m, 1]
                if active[m] and alive[level, kind]:
                    load = busy[kind, i] - busy[kind, j] + rate[kind] * paid
                    if hosted:
                        load = max(load, launch[kind, i] - launch[kind, j])
                    chain = max(load, slowest[moves[m, 0], j])
                    if load <= threshold and chain < slowest[b, i] and allowed[b, i]:
                        slowest[b, i], origin[b, i], via[b, i] = chain, j, m
                    start = busy[kind, j] - rate[kind] * live[j]
                    if open_now == 0 and closing and start > top[m, i]:
                        top[m, i], top_from[m, i] = start, j
            # Behind a closure the starts that were left there take over.
            descend = on and not (open_now == 0 and closing)
            cursor[level] = pointer[i] if descend else pointer[i + 1]
    return origin, via, taken
