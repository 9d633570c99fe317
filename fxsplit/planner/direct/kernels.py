"""The kernel for the cost model in which a stage pays for each tensor that it shares with another stage.

A stage S = I - J pays for a tensor if some of its pins (nodes that make or read it) lie in S and some outside. This
does not separate into a term of J and a term of I. So for each J that ends a chain, a walk adds nodes in ascending
order, visits every larger ideal once, and counts the tensors paid for. Two rules keep the walks short:

- bounds: however much S grows, it pays for the tensors that now have pins both in S and in J. And a larger I has no
  smaller end than the cheapest ideal above. The walk goes no further if one of these bounds exceeds the threshold
- closure: once I holds every pin of every tensor live at J, load(J, I) = end(I) - start(J) for all larger I. The walk
  stops there, and the start of J is carried on along the edges of the lattice, as in `separable`
"""

from __future__ import annotations

import numpy as np

from fxsplit.planner.kernels.separable import SLACK
from fxsplit.planner.kernels.tables import IDLE, Floats, Ints, Lattice, SharedTensors, Tables


def cheapest_above(pointer: Ints, child: Ints, end: Floats) -> Floats:
    """Return, per kind and ideal, the smallest `end` of the ideal and all larger ideals, as float64 [kinds, ideals]."""
    least = end.copy()
    # Go from the full ideal down, so that larger ideals are done.
    for i in range(pointer.size - 2, -1, -1):
        for e in range(pointer[i], pointer[i + 1]):
            for k in range(end.shape[0]):
                least[k, i] = min(least[k, i], least[k, child[e]])
    return least


def reach(
    lattice: Lattice, t: Tables, shared: SharedTensors, closing: bool, threshold: float, steps: int
) -> tuple[Ints, Ints, int]:
    """Find the ideals that end a chain in which every stage has load <= `threshold` (ms) and fits in memory.

    `t.end` is the time of all nodes inside an ideal, and `t.space_low` their memory. `closing` permits closures, which
    ignore memory and launches. The kernel stops after `steps` steps.

    Returns, as `separable.reach`, two tables [configurations, ideals] with the ideal at which the last stage starts and
    with its move, and the number of steps.
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
    # The slowest load of the best chain that ends here. Only a better chain replaces it.
    slowest = np.full((configurations, n), np.inf)
    origin[0, 0] = 0
    slowest[0, 0] = -np.inf
    # For each move, the best start carried from a closure below, and the ideal J that it belongs to.
    top = np.full((moves.shape[0], n), -np.inf)
    top_from = np.full((moves.shape[0], n), -1, np.int32)
    inside = np.zeros(total.size, np.int32)  # pins in J
    added = np.zeros(total.size, np.int32)  # pins in S
    # The path in the enumeration tree to J: each ideal has one more block.
    path = np.zeros(nodes + 1, np.int32)
    depth = 0
    # The number of tensors live at J. At a closure all of them have every pin inside.
    open_at_start = 0
    # The walk from J: for each level, the ideal, the next edge to try, and the last added node.
    at = np.zeros(nodes + 2, np.int32)
    cursor = np.zeros(nodes + 2, np.int64)
    entered = np.zeros(nodes + 2, np.int32)
    active = np.zeros(moves.shape[0], np.bool_)
    usable = np.zeros(kinds, np.bool_)
    # Kinds of moves still below the threshold, by level. A larger stage never revives a kind.
    alive = np.zeros((nodes + 2, kinds), np.bool_)
    taken = 0
    for j in range(n):
        taken += 1
        if taken > steps:
            break
        # Update the counts of pins inside J from the previous J, along the enumeration tree.
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
        # End stages here that started at a carried start: their loads separate.
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
            # No larger ideal ends this stage in time: drop the start.
            if least[kind, j] - top[m, j] > threshold:
                top[m, j] = -np.inf
                continue
            b = moves[m, 1]
            load = busy[kind, j] + rate[kind] * live[j] - top[m, j]
            chain = max(load, slowest[moves[m, 0], top_from[m, j]])
            if load <= threshold and chain < slowest[b, j] and allowed[b, j]:
                slowest[b, j], origin[b, j], via[b, j] = chain, top_from[m, j], m
        # An empty stage ends at its start, and takes no time.
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
        # Start stages here for the moves that a chain can take, unless a chain with fewer devices came as far.
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
        # If no tensor is live at J, J is itself a closure and needs no walk.
        if open_at_start == 0 and closing:
            for m in range(moves.shape[0]):
                if active[m] and busy[moves[m, 2], j] > top[m, j]:
                    top[m, j], top_from[m, j] = busy[moves[m, 2], j], j
            continue
        # `paid`: bytes that S pays for now. `fixed`: bytes that every larger S pays for too, of tensors with pins in J.
        paid, fixed, open_now = 0.0, 0.0, open_at_start
        level = 0
        at[0], cursor[0], entered[0] = j, pointer[j], -1
        for k in range(kinds):
            alive[0, k] = usable[k]
        while level >= 0 and taken <= steps:
            taken += 1
            # All larger ideals are done: remove the last node from the stage.
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
            # Add nodes in ascending order only, so that each larger ideal is visited once.
            if v < entered[level]:
                continue
            i = child[edge]
            for e in range(pins_ptr[v], pins_ptr[v + 1]):
                x = pins[e]
                added[x] += 1
                # The first pin in S makes the stage pay for a tensor, and the last pin inside S ends that.
                paid += size[x] * (int(added[x] == 1) - int(added[x] == total[x]))
                fixed += size[x] * int(added[x] == 1 and inside[x] > 0)
                open_now -= int(inside[x] > 0 and inside[x] + added[x] == total[x])
            level += 1
            at[level], entered[level] = i, v
            # Continue only with kinds under which this stage or a larger one may stay below the threshold.
            on = False
            for k in range(kinds):
                alive[level, k] = False
                if alive[level - 1, k] and space[k, i] - space[k, j] <= capacity[k]:
                    # Two lower bounds for this and every larger stage: the fixed bytes, and the cheapest end above.
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
            # After a closure the carried starts take over.
            descend = on and not (open_now == 0 and closing)
            cursor[level] = pointer[i] if descend else pointer[i + 1]
    return origin, via, taken
