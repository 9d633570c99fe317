"""The arrays that the kernels read, in named tuples that numba compiles for.

Every array is C-contiguous with exactly the stated dtype: each kernel is then compiled once, and the next process finds
it in numba's cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
IDLE = -1
"""The kind of a move that leaves a device idle: the chain goes on from the same ideal in the next configuration."""


class StageNeeds(NamedTuple):
    """A lower bound of the bytes that a stage holds in addition to sums over states; empty arrays for none.

    - far: [edges], the bytes in use while the block of an edge runs, including all activations before it
    - freed: [ideals], the part of `far` that the sums contain already

    Stage J..I holds max(far - freed[I], 0) more, with the largest far of the edges on any path from J to I.
    """

    far: Floats
    freed: Floats


NO_NEEDS = StageNeeds(np.zeros(0), np.zeros(0))
"""For unlimited memory, or memory that is a sum over states."""


class BannedStages(NamedTuple):
    """Stages that do not fit although the sums allow them: for each kind and start, the banned ends, in CSR form.

    pointer: int64 [kinds x ideals + 1], or of size 1 if no stage is banned. Row kind x ideals + start lists its ends.
    """

    pointer: NDArray[np.int64]
    ends: Ints


NO_BANS = BannedStages(np.zeros(1, np.int64), np.zeros(0, np.int32))
"""For a problem without banned stages."""


class Tables(NamedTuple):
    """A search problem: the costs of each kind of move from and to each ideal.

    - in_ptr, in_from: the ideals just below each ideal, CSR
    - work: [ideals], the work of the nodes inside, in ms
    - start, end, start_floor, end_floor: [kinds, ideals], in ms; load(J, I) = max(end[I] - start[J], start_floor[J],
      end_floor[I])
    - space_start, space_end: [kinds, ideals], in bytes; a stage may fit if space_end[I] - space_start[J] plus its
      `needs` is at most `capacity` [kinds], unless it is in `bans`
    - space_low: the part of space_end that only grows with I
    - launch: [kinds, ideals], in ms; a load is at least launch[I] - launch[J]; [0, 0] without launches
    - allowed: [configurations, ideals], whether a stage may end there
    - moves: [moves, 3] of (from, to, kind or IDLE), ordered so that a configuration is complete before a move leaves it
    - done, left: [configurations], the most work that the used devices, and the unused devices, do in 1 ms of load
    - may_idle: whether a stage may be empty
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
    needs: StageNeeds
    bans: BannedStages
    launch: Floats
    allowed: Bools
    moves: Ints
    done: Floats
    left: Floats
    may_idle: bool

    def take(self, states: NDArray[np.int64]) -> Tables:
        """Return the tables of a subset of the states. The caller supplies the edges between them."""
        # Make contiguous copies: numba would compile the kernel again for another layout.
        by_kind = ["start", "end", "start_floor", "end_floor", "space_start", "space_end", "space_low", "allowed"]
        by_kind += ["launch"] if self.launch.size else []
        chosen: dict[str, Any] = {name: np.ascontiguousarray(getattr(self, name)[:, states]) for name in by_kind}
        return self._replace(work=self.work[states], **chosen)


class Lattice(NamedTuple):
    """The ideals as `parent` and `last` (see `lattice.enumerate_ideals`), and the edges upward in CSR form."""

    parent: Ints
    last: Ints
    pointer: Ints
    node: Ints
    child: Ints


class SharedTensors(NamedTuple):
    """The tensors that stages share under direct sends.

    - pins_ptr, pins: the tensors at each node, CSR
    - total: [tensors], the number of pins
    - size: [tensors], bytes
    - rate: [kinds], ms per byte
    - live: [ideals], bytes of the tensors with pins on both sides
    - least: [kinds, ideals], the smallest end of this and all larger ideals (`cheapest_above`), including live tensors
    - better: [configurations, configurations], whether the first makes the second useless: it has fewer used devices,
      and no other ones
    """

    pins_ptr: Ints
    pins: Ints
    total: Ints
    size: Floats
    rate: Floats
    live: Floats
    least: Floats
    better: Bools
