"""Kernels over the lattice of ideals (downsets) of a DAG whose nodes are numbered in topological order.

Every ideal has one ascending sequence of node numbers, each prefix of which is an ideal too. So a depth-first search
that extends an ideal only by available nodes above its maximum meets each ideal once, without hashing: `parent` is the
ideal without its maximum and `last` is that maximum. Visiting the largest extension first makes the numbering of the
ideals a linear extension of inclusion: a subset always has the smaller number. Ideal 0 is empty, the last one is full.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from fxsplit.kernels.arrays import grown

Array = Any  # numba specialises on the dtypes, which fxsplit.kernels states


@njit(cache=True)
def enumerate_ideals(indegree: Array, succ_ptr: Array, succ: Array, cap: int) -> Any:
    """Enumerate every ideal: int32 arrays `parent` and `last`, and whether all fitted under `cap`.

    `indegree` counts distinct predecessors of each node; `succ` holds each node's successors ascending, in CSR form.
    """
    n = indegree.size
    parent = np.empty(1024, np.int32)
    last = np.empty(1024, np.int32)
    parent[0] = -1
    last[0] = -1
    count = 1
    waiting = indegree.copy()  # predecessors not yet in the ideal on the current path
    pool = np.empty(4 * n + 16, np.int32)  # for each depth, the available nodes above the path's maximum, ascending
    begin = np.zeros(n + 2, np.int64)
    end = np.zeros(n + 2, np.int64)
    cursor = np.zeros(n + 2, np.int64)
    ideal = np.zeros(n + 2, np.int32)
    for v in range(n):
        if waiting[v] == 0:
            pool[end[0]] = v
            end[0] += 1
    cursor[0] = end[0] - 1
    depth = 0
    while depth >= 0:
        if cursor[depth] < begin[depth]:
            if depth > 0:
                v = last[ideal[depth]]
                for i in range(succ_ptr[v], succ_ptr[v + 1]):
                    waiting[succ[i]] += 1
            depth -= 1
            continue
        at = cursor[depth]
        v = pool[at]
        cursor[depth] -= 1
        if count >= cap:
            return parent[:count].copy(), last[:count].copy(), False
        if count == parent.size:
            parent = grown(parent, 2 * count)
            last = grown(last, 2 * count)
        parent[count] = ideal[depth]
        last[count] = v
        upper = end[depth]
        depth += 1
        ideal[depth] = count
        count += 1
        begin[depth] = upper
        released = succ_ptr[v + 1] - succ_ptr[v]
        if upper + (upper - at) + released > pool.size:
            pool = grown(pool, 2 * (upper + (upper - at) + released))
        # Merge what was available above v with what v releases; both are ascending and above v.
        write = upper
        read = at + 1
        for i in range(succ_ptr[v], succ_ptr[v + 1]):
            waiting[succ[i]] -= 1
            if waiting[succ[i]] == 0:
                while read < upper and pool[read] < succ[i]:
                    pool[write] = pool[read]
                    write += 1
                    read += 1
                pool[write] = succ[i]
                write += 1
        while read < upper:
            pool[write] = pool[read]
            write += 1
            read += 1
        end[depth] = write
        cursor[depth] = write - 1
    return parent[:count].copy(), last[:count].copy(), True


@njit(cache=True)
def lattice_edges(parent: Array, last: Array) -> Any:
    """Return every edge I -> I + v in CSR form by I: pointer, v ascending, and the number of I + v.

    Edges with v above max(I) are the search tree's own. For v below m = max(I) and J = I - m, the ideal I + v is the
    child by m of (the child of J by v), and both are known already because J < I.
    """
    n = parent.size
    tree_ptr = np.zeros(n + 1, np.int32)
    for i in range(1, n):
        tree_ptr[parent[i] + 1] += 1
    for i in range(n):
        tree_ptr[i + 1] += tree_ptr[i]
    fill = tree_ptr[:n].copy()
    tree = np.empty(max(n - 1, 1), np.int32)
    for i in range(n - 1, 0, -1):  # descending numbers are ascending nodes
        tree[fill[parent[i]]] = i
        fill[parent[i]] += 1
    pointer = np.zeros(n + 1, np.int32)
    node = np.empty(2 * n + 16, np.int32)
    child = np.empty(2 * n + 16, np.int32)
    count = 0
    for i in range(n):
        own = tree_ptr[i + 1] - tree_ptr[i]
        inherited = 0 if i == 0 else pointer[parent[i] + 1] - pointer[parent[i]]
        if count + own + inherited > node.size:
            node = grown(node, 2 * (count + own + inherited))
            child = grown(child, 2 * (count + own + inherited))
        if i > 0:
            j, m = parent[i], last[i]
            for e in range(pointer[j], pointer[j + 1]):
                if node[e] >= m:
                    break
                beside = child[e]
                low, high = tree_ptr[beside], tree_ptr[beside + 1]
                while low < high:  # the tree child of `beside` by m
                    middle = (low + high) // 2
                    if last[tree[middle]] < m:
                        low = middle + 1
                    else:
                        high = middle
                node[count] = node[e]
                child[count] = tree[low]
                count += 1
        for e in range(tree_ptr[i], tree_ptr[i + 1]):
            node[count] = last[tree[e]]
            child[count] = tree[e]
            count += 1
        pointer[i + 1] = count
    return pointer, node[:count].copy(), child[:count].copy()


@njit(cache=True)
def live_bytes(
    parent: Array,
    last: Array,
    makes_ptr: Array,
    makes: Array,
    reads_ptr: Array,
    reads: Array,
    left: Array,
    size: Array,
) -> Any:
    """Return, per ideal, the summed size of the values it makes that something outside it still reads.

    `makes` and `reads` list each node's values in CSR form; `left` counts each value's distinct readers (an output of
    the graph has one more, which never comes), `size` is float64. Values that exist before any node are counted in
    the empty ideal. Replays the enumeration in its own order with counters and undo, so that each ideal costs only
    the values its last node touches.
    """
    n = parent.size
    result = np.zeros(n, np.float64)
    made = np.zeros(left.size, np.bool_)
    for value in makes:
        made[value] = True
    start = 0.0
    for value in range(left.size):
        if not made[value] and left[value] > 0:
            start += size[value]
    waiting = left.copy()
    path = np.zeros(makes_ptr.size + 1, np.int32)
    live = np.zeros(makes_ptr.size + 1, np.float64)
    live[0] = start
    result[0] = start
    depth = 0
    for i in range(1, n):
        while path[depth] != parent[i]:
            v = last[path[depth]]
            for e in range(reads_ptr[v], reads_ptr[v + 1]):
                waiting[reads[e]] += 1
            depth -= 1
        v = last[i]
        now = live[depth]
        for e in range(reads_ptr[v], reads_ptr[v + 1]):
            waiting[reads[e]] -= 1
            if waiting[reads[e]] == 0:
                now -= size[reads[e]]
        for e in range(makes_ptr[v], makes_ptr[v + 1]):
            if waiting[makes[e]] > 0:
                now += size[makes[e]]
        depth += 1
        path[depth] = i
        live[depth] = now
        result[i] = now
    return result


@njit(cache=True)
def prefix_sums(parent: Array, last: Array, weight: Array) -> Any:
    """Return, per ideal, the sum of the rows of `weight` [nodes, columns] of its nodes: float64 [ideals, columns]."""
    n, columns = parent.size, weight.shape[1]
    result = np.zeros((n, columns), np.float64)
    for i in range(1, n):
        for c in range(columns):
            result[i, c] = result[parent[i], c] + weight[last[i], c]
    return result
