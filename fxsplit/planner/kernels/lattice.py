"""Kernels over the lattice of ideals (downsets) of a DAG whose nodes are numbered in topological order.

Every ideal has one ascending sequence of node numbers, each prefix of which is an ideal too. A depth-first search that
extends an ideal only by nodes above its maximum, whose predecessors are all inside, meets each ideal once, without a
hash table. `parent` is the ideal without its maximum and `last` is that maximum. The search visits the largest
extension first, and so numbers each ideal after all its subsets. Ideal 0 is empty, the last one is full.

In the graph 0 -> 1 -> 3, 0 -> 2 -> 3 the ideals are, in this order: {}, {0}, {0, 2}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}.
"""

from __future__ import annotations

import numpy as np

from fxsplit.planner.kernels.tables import Floats, Ints


def enumerate_ideals(indegree: Ints, succ_ptr: Ints, succ: Ints, cap: int) -> tuple[Ints, Ints, bool]:
    """Enumerate every ideal: int32 arrays `parent` and `last`, and whether all fitted under `cap`.

    `indegree` counts distinct predecessors of each node; `succ` holds each node's successors ascending, in CSR form.
    """
    n = indegree.size
    # Nobody knows how many ideals there are: the arrays double when they are full.
    parent = np.empty(1024, np.int32)
    last = np.empty(1024, np.int32)
    parent[0] = -1
    last[0] = -1
    count = 1
    waiting = indegree.copy()  # predecessors not yet in the ideal on the current path
    pool = np.empty(4 * n + 16, np.int32)  # for each depth, the available nodes above the path's maximum, ascending
    # At each depth of the search: where its available nodes lie in the pool, the next to try, and the ideal.
    begin = np.zeros(n + 2, np.int64)
    end = np.zeros(n + 2, np.int64)
    cursor = np.zeros(n + 2, np.int64)
    ideal = np.zeros(n + 2, np.int32)
    # At the empty ideal the nodes without predecessors are available.
    for v in range(n):
        if waiting[v] == 0:
            pool[end[0]] = v
            end[0] += 1
    cursor[0] = end[0] - 1
    depth = 0
    while depth >= 0:
        # All extensions of this ideal have been visited: take its last node out again.
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
        # The count only grows, so that the search can be given up here.
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


def lattice_edges(parent: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Return every edge I -> I + v in CSR form by I: pointer, v ascending, and the number of I + v.

    Edges with v above max(I) are the search tree's own. For v below m = max(I) and J = I - m, the ideal I + v is the
    child by m of (the child of J by v), and both are known already because J < I.
    """
    n = parent.size
    # Count the extensions of each ideal, and turn the counts into places.
    tree_ptr = np.zeros(n + 1, np.int32)
    for i in range(1, n):
        tree_ptr[parent[i] + 1] += 1
    for i in range(n):
        tree_ptr[i + 1] += tree_ptr[i]
    fill = tree_ptr[:n].copy()
    tree = np.empty(max(n - 1, 1), np.int32)
    # Of an ideal's extensions the one by the largest node has the smallest number: go through them backwards.
    for i in range(n - 1, 0, -1):
        tree[fill[parent[i]]] = i
        fill[parent[i]] += 1
    pointer = np.zeros(n + 1, np.int32)
    # Room for two edges an ideal; the arrays grow where there are more.
    node = np.empty(2 * n + 16, np.int32)
    child = np.empty(2 * n + 16, np.int32)
    count = 0
    for i in range(n):
        # An ideal has the edges of the search tree, and at most one for each edge of its parent.
        own = tree_ptr[i + 1] - tree_ptr[i]
        inherited = 0 if i == 0 else pointer[parent[i] + 1] - pointer[parent[i]]
        if count + own + inherited > node.size:
            more = np.empty(count + 2 * (own + inherited), np.int32)
            node = np.concatenate((node, more))
            child = np.concatenate((child, more))
        if i > 0:
            j, m = parent[i], last[i]
            for e in range(pointer[j], pointer[j + 1]):
                # Edges ascend by node. From the maximum on they are the tree's own.
                if node[e] >= m:
                    break
                beside = child[e]
                low, high = tree_ptr[beside], tree_ptr[beside + 1]
                # Bisect for the extension of `beside` by m, among its extensions in ascending order.
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
    """Return, per ideal, the summed sizes of the values that are live across it: float64 [ideals, columns].

    `pins` lists, in CSR form by node, the values that the node makes or reads. Value v is live where more than none and
    fewer than `total[v]` of its pins are inside, of which `inside[v]` are from the start; `size` is float64 [values,
    columns]. The kernel goes through the ideals in the order of their enumeration, and counts the pins inside each. So
    an ideal costs no more than the values that its last node makes or reads.
    """
    n, nodes, columns = parent.size, pins_ptr.size - 1, size.shape[1]
    result = np.zeros((n, columns), np.float64)
    count = inside.copy()
    for v in range(total.size):
        if 0 < count[v] < total[v]:
            for c in range(columns):
                result[0, c] += size[v, c]
    # The ideals on the way to the one in hand, each one block larger.
    path = np.zeros(nodes + 1, np.int32)
    depth = 0
    for i in range(1, n):
        # Go back to the ideal that this one extends, and take the counts of the nodes in between out again.
        while path[depth] != parent[i]:
            for e in range(pins_ptr[last[path[depth]]], pins_ptr[last[path[depth]] + 1]):
                count[pins[e]] -= 1
            depth -= 1
        for c in range(columns):
            result[i, c] = result[path[depth], c]
        for e in range(pins_ptr[last[i]], pins_ptr[last[i] + 1]):
            v = pins[e]
            count[v] += 1
            # The first pin makes a value live, and the last one ends that.
            sign = int(count[v] == 1) - int(count[v] == total[v])
            for c in range(columns):
                result[i, c] += sign * size[v, c]
        depth += 1
        path[depth] = i
    return result


def prefix_sums(parent: Ints, last: Ints, weight: Floats) -> Floats:
    """Return, per ideal, the sum of the rows of `weight` [nodes, columns] of its nodes: float64 [ideals, columns]."""
    n, columns = parent.size, weight.shape[1]
    result = np.zeros((n, columns), np.float64)
    for i in range(1, n):
        for c in range(columns):
            result[i, c] = result[parent[i], c] + weight[last[i], c]
    return result


def first_missing(parent: Ints, last: Ints, rank: Ints) -> Ints:
    """Return, per ideal, the smallest rank of a node that is outside, or the number of nodes: int32 [ideals].

    `rank` numbers the nodes in some other order.
    """
    n, nodes = parent.size, rank.size
    result = np.zeros(n, np.int32)
    inside = np.zeros(nodes + 1, np.bool_)
    path = np.zeros(nodes + 1, np.int32)
    depth = 0
    for i in range(1, n):
        # Go back to the ideal that this one extends, as in `live_bytes`.
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
    """Return the edges the other way round, CSR by their end: pointer, and the ideals just below each, ascending."""
    n = pointer.size - 1
    back = np.zeros(n + 1, np.int32)
    for e in range(child.size):
        back[child[e] + 1] += 1
    for i in range(n):
        back[i + 1] += back[i]
    # Going through the edges by their start fills each list in ascending order.
    fill = back[:n].copy()
    start = np.empty(child.size, np.int32)
    for i in range(n):
        for e in range(pointer[i], pointer[i + 1]):
            start[fill[child[e]]] = i
            fill[child[e]] += 1
    return back, start
