"""What the kernels read: arrays by name, in frozen structs that numba compiles for.

Every array is C contiguous and has exactly the dtype stated, so that each kernel is compiled once and found in numba's
cache by the next process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
IDLE = -1
"""The kind of a move that leaves a device idle: a chain goes on in the next configuration, from the same ideal."""


class Needs(NamedTuple):
    """What stages need in memory besides what sums over states, in bytes; all arrays are empty where that is nothing.

    near, far: [edges], what the block of each edge needs, beside all activations of its stage and beside those up to
    it. lead: [ideals], how many fewer activations are sure to lie before the first node outside than there are inside,
    as a number below zero. freed: [ideals], activations, less those that are handed on. loss: [ideals], what a stage
    that ends here needs at least. The stage J..I needs max(min(near, far - lead[J] - freed[I]), loss[I]), with the
    largest near and far of the edges on any way from J to I.
    """

    near: Floats
    far: Floats
    lead: Floats
    freed: Floats
    loss: Floats


class Tables(NamedTuple):
    """A search problem: what each move of each kind costs from and to each ideal.

    in_ptr, in_from: the ideals just below each ideal, CSR. work: [ideals], what sums over nodes, in ms.
    start, end, start_floor, end_floor: [kinds, ideals], ms; load(J, I) = max(end[I] - start[J], start_floor[J],
    end_floor[I]). space_start, space_end: [kinds, ideals], bytes; a stage fits if space_end[I] - space_start[J] <=
    capacity, of [kinds], with what it needs besides by `needs`. space_low is the part of space_end that only grows with
    I.
    launch: [kinds, ideals], ms; a load is at least launch[I] - launch[J]. It is [0, 0] where nothing is launched.
    allowed: [configurations, ideals], where a stage may end. moves: [moves, 3] of (from, to, kind or IDLE), in an order
    in which a configuration is complete before it is left. done, left: [configurations], how much work the devices used
    so far, and those not used, do at most in 1 ms of load. may_idle: whether a stage may be empty.
    """

    in_ptr: Ints
    in_from: Ints
    work: Floats
    start: Floats
    end: Floats
    start_floor: Floats
    end_floor: Floats
    space_start: Floats
    space_end: Floats
    space_low: Floats
    capacity: Floats
    needs: Needs
    launch: Floats
    allowed: Bools
    moves: Ints
    done: Floats
    left: Floats
    may_idle: bool

    def take(self, states: NDArray[np.int64]) -> Tables:
        """Return the tables of some states alone; the edges between them are the caller's to give."""
        # Contiguous copies: numba compiles a kernel anew for arrays of another layout.
        by_kind = ["start", "end", "start_floor", "end_floor", "space_start", "space_end", "space_low", "allowed"]
        by_kind += ["launch"] if self.launch.size else []
        chosen: dict[str, Any] = {name: np.ascontiguousarray(getattr(self, name)[:, states]) for name in by_kind}
        return self._replace(work=self.work[states], **chosen)


class Lattice(NamedTuple):
    """The ideals: `parent` and `last` as `lattice.enumerate_ideals` returns them, and the edges upward in CSR form."""

    parent: Ints
    last: Ints
    pointer: Ints
    node: Ints
    child: Ints


class Tensors(NamedTuple):
    """What stages share under direct sends.

    pins_ptr, pins: the tensors at each node, CSR. total: [tensors], how many pins each has. size: [tensors], bytes.
    rate: [kinds], ms per byte. live: [ideals], bytes of the tensors with pins on both sides. least: [kinds, ideals],
    `cheapest_above` of the time of an ideal and of its live tensors. better: [configurations, configurations],
    whether the first makes the second useless.
    """

    pins_ptr: Ints
    pins: Ints
    total: Ints
    size: Floats
    rate: Floats
    live: Floats
    least: Floats
    better: Bools
