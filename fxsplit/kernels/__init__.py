"""The compiled inner loops of the planner: arrays in, arrays out.

numba is imported when a kernel is first called, because loading it takes about a second. Each function here is the
typed door to the kernel of the same name.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def enumerate_ideals(indegree: Ints, succ_ptr: Ints, succ: Ints, cap: int) -> tuple[Ints, Ints, bool]:
    """Return (parent, last, complete) of every ideal; see `lattice.enumerate_ideals`."""
    from fxsplit.kernels import lattice

    parent, last, complete = lattice.enumerate_ideals(indegree, succ_ptr, succ, cap)
    return parent, last, bool(complete)


def lattice_edges(parent: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (pointer, node, child id) in CSR form of every edge; see `lattice.lattice_edges`."""
    from fxsplit.kernels import lattice

    pointer, node, child = lattice.lattice_edges(parent, last)
    return pointer, node, child


def live_bytes(
    parent: Ints, last: Ints, makes_ptr: Ints, makes: Ints, reads_ptr: Ints, reads: Ints, left: Ints, size: Floats
) -> Floats:
    """Return the summed `size` of the values live across each ideal; see `lattice.live_bytes`."""
    from fxsplit.kernels import lattice

    result: Floats = lattice.live_bytes(parent, last, makes_ptr, makes, reads_ptr, reads, left, size)
    return result


def prefix_sums(parent: Ints, last: Ints, weight: Floats) -> Floats:
    """Return the summed `weight` rows of the nodes in each ideal; see `lattice.prefix_sums`."""
    from fxsplit.kernels import lattice

    result: Floats = lattice.prefix_sums(parent, last, weight)
    return result


def reach(
    in_ptr: Ints,
    in_from: Ints,
    features: Floats,
    load: Floats,
    memory: Floats,
    capacity: Floats,
    allowed: Bools,
    work: Floats,
    later: Floats,
    threshold: float,
    may_idle: bool,
) -> tuple[Ints, float]:
    """Return which ideals end a chain of stages under `threshold`, and the next threshold; see `chain.reach`."""
    from fxsplit.kernels import chain

    choice, following = chain.reach(
        in_ptr, in_from, features, load, memory, capacity, allowed, work, later, threshold, may_idle
    )
    return choice, float(following)
