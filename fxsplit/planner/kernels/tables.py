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
    """What stages hold at least besides what sums over states, in bytes; both arrays are empty where that is nothing.

    far: [edges], what there is while the block of an edge runs, with all activations before it. freed: [ideals], what
    the sums have of that. The stage J..I holds max(far - freed[I], 0) more, with the largest far of the edges on any
    way from J to I.
    """

    far: Floats
    freed: Floats


NO_NEEDS = Needs(np.zeros(0), np.zeros(0))
"""Of a problem in which memory has no limit, or is all sums."""


class Bans(NamedTuple):
    """Stages that are known not to fit although the sums say that they may: for each kind and start the ends, CSR.

    pointer: int64 [kinds x ideals + 1], or of size 1 where no stage is banned.
    """

    pointer: NDArray[np.int64]
    ends: Ints


NO_BANS = Bans(np.zeros(1, np.int64), np.zeros(0, np.int32))
"""Of a problem in which no stage is known not to fit."""


class Tables(NamedTuple):
    """A search problem: what each move of each kind costs from and to each ideal.

    in_ptr, in_from: the ideals just below each ideal, CSR. work: [ideals], what sums over nodes, in ms.
    start, end, start_floor, end_floor: [kinds, ideals], ms; load(J, I) = max(end[I] - start[J], start_floor[J],
    end_floor[I]). space_start, space_end: [kinds, ideals], bytes; a stage may fit if space_end[I] - space_start[J] <=
    capacity, of [kinds], with what it needs besides by `needs`, unless it is one of `bans`. space_low is the part of
    space_end that only grows with I.
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
    bans: Bans
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
