"""The inner loops of the planner: arrays in, arrays out.

Each kernel is a plain function over arrays. For a small graph it runs as it is, in milliseconds; for a large one numba
compiles it, and is imported only then, because loading it takes about a second. Each function here is the typed door
to the kernel of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxsplit.planner.kernels import dense, direct, lattice, separable

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SMALL = 600
"""Ideals below which plain Python is quicker than loading numba."""


_preferred = False


def prefer_compiled(preferred: bool = True) -> None:
    """Compile for small graphs too, from now on: for a process that plans again and again. Plans stay the same."""
    global _preferred
    _preferred = preferred


def worth_compiling(ideals: int) -> bool:
    """Return whether to use compiled kernels for a number of ideals."""
    return _preferred or ideals > SMALL


@cache
def compile_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel compiled, from numba's cache where it has been compiled before."""
    from numba import njit

    machine_code: Callable[..., Any] = njit(cache=True)(kernel)
    return machine_code


def fit(kernel: Callable[..., Any], ideals: int) -> Callable[..., Any]:
    """Return the kernel in the form that is right for a number of ideals."""
    return compile_kernel(kernel) if worth_compiling(ideals) else kernel


def enumerate_ideals(indegree: Ints, succ_ptr: Ints, succ: Ints, cap: int) -> tuple[Ints, Ints, bool]:
    """Return (parent, last, complete) of every ideal; see `lattice.enumerate_ideals`."""
    parent, last, complete = fit(lattice.enumerate_ideals, 0)(indegree, succ_ptr, succ, min(cap, SMALL))
    if not complete and cap > SMALL:
        parent, last, complete = compile_kernel(lattice.enumerate_ideals)(indegree, succ_ptr, succ, cap)
    return parent, last, bool(complete)


def lattice_edges(parent: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (pointer, node, child id) in CSR form of every edge; see `lattice.lattice_edges`."""
    pointer, node, child = fit(lattice.lattice_edges, parent.size)(parent, last)
    return pointer, node, child


def live_bytes(parent: Ints, last: Ints, pins_ptr: Ints, pins: Ints, inside: Ints, total: Ints, size: Floats) -> Floats:
    """Return the summed `size` rows of the values live across each ideal; see `lattice.live_bytes`."""
    result: Floats = fit(lattice.live_bytes, parent.size)(parent, last, pins_ptr, pins, inside, total, size)
    return result


def prefix_sums(parent: Ints, last: Ints, weight: Floats) -> Floats:
    """Return the summed `weight` rows of the nodes in each ideal; see `lattice.prefix_sums`."""
    result: Floats = fit(lattice.prefix_sums, parent.size)(parent, last, weight)
    return result


def reversed_edges(pointer: Ints, child: Ints) -> tuple[Ints, Ints]:
    """Return the ideals just below each, CSR; see `lattice.reversed_edges`."""
    back, start = fit(lattice.reversed_edges, pointer.size - 1)(pointer, child)
    return back, start


def reach(
    in_ptr: Ints,
    in_from: Ints,
    work: Floats,
    start: Floats,
    end: Floats,
    start_floor: Floats,
    end_floor: Floats,
    allowed: Bools,
    moves: Ints,
    done: Floats,
    left: Floats,
    may_idle: bool,
    threshold: float,
    steps: int,
    bounded: tuple[Floats, Floats, Floats, Floats] | None,
) -> tuple[Ints, Ints, int]:
    """Return which ideals end a chain of stages under `threshold`; see `separable.reach` and `reach_bounded`."""
    given = (in_ptr, in_from, work, start, end, start_floor, end_floor, allowed, moves, done, left, may_idle)
    kernel = separable.reach if bounded is None else separable.reach_bounded
    origin, via, taken = fit(kernel, in_ptr.size - 1)(*given, threshold, steps, *(bounded or ()))
    return origin, via, int(taken)


def best_chains(
    below: Bools,
    work: Floats,
    start: Floats,
    end: Floats,
    start_floor: Floats,
    end_floor: Floats,
    space_start: Floats,
    space_end: Floats,
    capacity: Floats,
    shared: Floats,
    rate: Floats,
    allowed: Bools,
    moves: Ints,
    done: Floats,
    left: Floats,
    upper: float,
) -> tuple[Floats, Ints, Ints]:
    """Return the best chain of stages to every state, compiled; see `dense.best_chains`."""
    given = (below, work, start, end, start_floor, end_floor, space_start, space_end, capacity, shared, rate, allowed)
    best, origin, via = compile_kernel(dense.best_chains)(*given, moves, done, left, upper)
    return best, origin, via


def cheapest_above(pointer: Ints, child: Ints, end: Floats) -> Floats:
    """Return the least `end` of each ideal and of all larger ones; see `direct.cheapest_above`."""
    result: Floats = fit(direct.cheapest_above, pointer.size - 1)(pointer, child, end)
    return result


def reach_direct(
    lattice: tuple[Ints, Ints, Ints, Ints, Ints],
    below: tuple[Ints, Ints],
    costs: tuple[Floats, Floats, Floats, Floats, Floats],
    memory: tuple[Floats, Floats],
    tensors: tuple[Ints, Ints, Ints, Floats],
    moves: tuple[Bools, Ints, Floats, Bools],
    may_idle: bool,
    closing: bool,
    threshold: float,
    steps: int,
) -> tuple[Ints, Ints, int]:
    """Return which ideals end a chain of stages under `threshold`; see `direct.reach`, whose groups these are."""
    kernel = fit(direct.reach, lattice[0].size)
    origin, via, taken = kernel(
        *lattice, *below, *costs, *memory, *tensors, *moves, may_idle, closing, threshold, steps
    )
    return origin, via, int(taken)
