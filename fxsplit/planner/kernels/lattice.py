"""Kernels over the lattice of ideals (downsets) of a DAG, with nodes numbered in topological order.

Write an ideal as the ascending sequence of its nodes: each prefix is an ideal too. A depth-first search that extends an
ideal only by available nodes above its maximum (all predecessors inside) visits each ideal once, without a hash table.
`parent` is the ideal without its maximum, and `last` is that maximum. The search takes the largest extension first, so
an ideal gets a larger number than all its subsets. Ideal 0 is empty, the last one is full.

    graph: 0 -> 1 -> 3      search tree:  {}                      number  0
           0 -> 2 -> 3                     +- {0}                         1
                                               +- {0, 2}                  2
                                               +- {0, 1}                  3
                                                   +- {0, 1, 2}           4
                                                       +- {0, 1, 2, 3}    5
"""

from __future__ import annotations

import numpy as np

from fxsplit.planner.kernels.tables import Floats, Ints


def enumerate_ideals(indegree: Ints, succ_ptr: Ints, succ: Ints, cap: int) -> tuple[Ints, Ints, bool]:
    """Enumerate the ideals: return int32 arrays `parent` and `last`, and whether all fit in `cap`.

    `indegree` counts the distinct predecessors of each node; `succ_ptr` and `succ` list its successors ascending, in
    CSR.
    """
    n = indegree.size
    # The number of ideals is unknown beforehand: double the arrays whenever they are full.
    parent = np.empty(1024, np.int32)
    last = np.empty(1024, np.int32)
    parent[0] = -1
    last[0] = -1
    count = 1
    waiting = indegree.copy()  # predecessors that the current ideal lacks
    pool = np.empty(4 * n + 16, np.int32)  # for each depth, the available nodes above the ideal's maximum, ascending
    # For each depth: the range of its available nodes in the pool, the next node to try, and the ideal.
    begin = np.zeros(n + 2, np.int64)
    end = np.zeros(n + 2, np.int64)
    cursor = np.zeros(n + 2, np.int64)
    ideal = np.zeros(n + 2, np.int32)
    # At the empty ideal, the nodes without predecessors are available.
    for v in range(n):
        if waiting[v] == 0:
            pool[end[0]] = v
            end[0] += 1
    cursor[0] = end[0] - 1
    depth = 0
    while depth >= 0:
        # All extensions of this ideal are done: remove its last node.
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
        # The count never shrinks, so the search can stop here.
        if count >= cap:
            return parent[:count].copy(), last[:count].copy(), False
        if count == parent.size:
            parent = np.concatenate((parent, np.empty_like(parent)))
            last = np.concatenate((last, np.empty_like(last)))
        parent[count] = ideal[depth]
        last[count] = v
        upper = end[depth]
        depth += 1
        ideal[depth] = count
        count += 1
        begin[depth] = upper
        released = succ_ptr[v + 1] - succ_ptr[v]
        if upper + (upper - at) + released > pool.size:
            pool = np.concatenate((pool, np.empty(2 * (upper + (upper - at) + released), np.int32)))
        # Merge the nodes still available above v with the nodes that v releases. Both lists ascend and lie above v.
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


def lattice_edges(parent: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Return every edge I -> I + v in CSR form by I: pointer, nodes v ascending, and the number of I + v.

    Edges with v above m = max(I) belong to the search tree. For v below m, let J = I - m. Then I + v is the child by m
    of (the child by v of J), and J < I, so both are known.
    """
    n = parent.size
    # Count the extensions of each ideal, and turn the counts into offsets.
    tree_ptr = np.zeros(n + 1, np.int32)
    for i in range(1, n):
        tree_ptr[parent[i] + 1] += 1
    for i in range(n):
        tree_ptr[i + 1] += tree_ptr[i]
    fill = tree_ptr[:n].copy()
    tree = np.empty(max(n - 1, 1), np.int32)
    # The extension by the largest node has the smallest number: iterate backwards.
    for i in range(n - 1, 0, -1):
        tree[fill[parent[i]]] = i
        fill[parent[i]] += 1
    pointer = np.zeros(n + 1, np.int32)
    # Start with room for two edges per ideal; the arrays grow if there are more.
    node = np.empty(2 * n + 16, np.int32)
    child = np.empty(2 * n + 16, np.int32)
    count = 0
    for i in range(n):
        # An ideal has its edges in the search tree, and at most one edge for each edge of its parent.
        own = tree_ptr[i + 1] - tree_ptr[i]
        inherited = 0 if i == 0 else pointer[parent[i] + 1] - pointer[parent[i]]
        if count + own + inherited > node.size:
            more = np.empty(count + 2 * (own + inherited), np.int32)
            node = np.concatenate((node, more))
            child = np.concatenate((child, more))
        if i > 0:
            j, m = parent[i], last[i]
            for e in range(pointer[j], pointer[j + 1]):
                # Edges ascend by node. From the maximum on they are edges of the search tree.
                if node[e] >= m:
                    break
                above = child[e]
                low, high = tree_ptr[above], tree_ptr[above + 1]
                # Bisect for the extension by m in the ascending list of extensions.
                while low < high:
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


def live_bytes(parent: Ints, last: Ints, pins_ptr: Ints, pins: Ints, inside: Ints, total: Ints, size: Floats) -> Floats:
    """Return the summed sizes of the values live across each ideal, as float64 [ideals, columns].

    `pins_ptr` and `pins` list, in CSR by node, the values that the node makes or reads. Value v is live across an ideal
    that contains at least one and fewer than `total[v]` of its pins; `inside[v]` of them are inside from the start.
    `size` is float64 [values, columns]. The kernel visits the ideals in the order of their enumeration and counts the
    pins inside. So the work for an ideal is proportional to the values at its last node.
    """
    n, nodes, columns = parent.size, pins_ptr.size - 1, size.shape[1]
    result = np.zeros((n, columns), np.float64)
    count = inside.copy()
    for v in range(total.size):
        if 0 < count[v] < total[v]:
            for c in range(columns):
                result[0, c] += size[v, c]
    # The path in the search tree to the current ideal: each ideal has one more block.
    path = np.zeros(nodes + 1, np.int32)
    depth = 0
    for i in range(1, n):
        # Return to the parent of this ideal, and remove the pins of the nodes on the way.
        while path[depth] != parent[i]:
            for e in range(pins_ptr[last[path[depth]]], pins_ptr[last[path[depth]] + 1]):
                count[pins[e]] -= 1
            depth -= 1
        for c in range(columns):
            result[i, c] = result[path[depth], c]
        for e in range(pins_ptr[last[i]], pins_ptr[last[i] + 1]):
            v = pins[e]
            count[v] += 1
            # The first pin makes a value live, and the last pin ends it.
            sign = int(count[v] == 1) - int(count[v] == total[v])
            for c in range(columns):
                result[i, c] += sign * size[v, c]
        depth += 1
        path[depth] = i
    return result


def prefix_sums(parent: Ints, last: Ints, weight: Floats) -> Floats:
    """Return for each ideal the sum of `weight` [nodes, columns] over its nodes, as float64 [ideals, columns]."""
    n, columns = parent.size, weight.shape[1]
    result = np.zeros((n, columns), np.float64)
    for i in range(1, n):
        for c in range(columns):
            result[i, c] = result[parent[i], c] + weight[last[i], c]
    return result


def first_missing(parent: Ints, last: Ints, rank: Ints) -> Ints:
    """Return for each ideal the smallest rank of a node outside, or the number of nodes if none is: int32 [ideals].

    `rank` numbers the nodes in a second order.
    """
    n, nodes = parent.size, rank.size
    result = np.zeros(n, np.int32)
    inside = np.zeros(nodes + 1, np.bool_)
    path = np.zeros(nodes + 1, np.int32)
    depth = 0
    for i in range(1, n):
        # Return to the parent of this ideal, as in `live_bytes`.
        while path[depth] != parent[i]:
            inside[rank[last[path[depth]]]] = False
            depth -= 1
        inside[rank[last[i]]] = True
        at = result[path[depth]]
        while inside[at]:
            at += 1
        result[i] = at
        depth += 1
        path[depth] = i
    return result


def reversed_edges(pointer: Ints, child: Ints) -> tuple[Ints, Ints]:
    """Return the reversed edges in CSR by their upper end: pointer, and the ideals just below each ideal, ascending."""
    n = pointer.size - 1
    back = np.zeros(n + 1, np.int32)
    for e in range(child.size):
        back[child[e] + 1] += 1
    for i in range(n):
        back[i + 1] += back[i]
    # Iterate by lower end, so that each list ascends.
    fill = back[:n].copy()
    start = np.empty(child.size, np.int32)
    for i in range(n):
        for e in range(pointer[i], pointer[i + 1]):
            start[fill[child[e]]] = i
            fill[child[e]] += 1
    return back, start
