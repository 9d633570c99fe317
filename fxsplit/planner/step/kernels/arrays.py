"""The arrays that the kernels read, in named tuples that numba compiles for.

Every array is C-contiguous with exactly the stated dtype: each kernel is then compiled once, and the next process finds
it in numba's cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]


class Prices(NamedTuple):
    """The time of the stage between any two ideals, as differences of sums; float64 [ideals], in ms for a microbatch.

    - `forward`, `input`, `weight`: F, I and W of all nodes inside
    - `reduce`: the parameters of all nodes inside, once over a link; r replicas sum their gradients in
      4 (r - 1) / r times that (see `price_split`)
    - `value`, `gradient`: how long a value, and a gradient, that crosses a cut after the ideal keeps a device busy
    - `held`: the bytes of all nodes inside that a device holds in any case; `kept`: their bytes for a microbatch
      between its forward and its backward; `taken`: the bytes that cross a cut after the ideal. A stage holds at least
      these
    - `capacity`: the bytes of a device
    - `members`: uint64 [ideals, words], a bit for each block inside
    - `nested`: bool [ideals, ideals], whether the first is a subset of the second; of size 0 if ideals are too many
    """

    forward: Floats
    input: Floats
    weight: Floats
    reduce: Floats
    value: Floats
    gradient: Floats
    held: Floats
    kept: Floats
    taken: Floats
    capacity: float
    members: Words
    nested: Bools


class Levels(NamedTuple):
    """The ideals in levels of work, in order: the first level has only the empty ideal, the last one only the full one.

    - `least`, `most`: [levels, 5], the least and most of F, I, W, REDUCE and work of the ideals of a level (see Prices)
    - `value`, `gradient`: [levels], the least of what crosses a cut after one of them
    """

    least: Floats
    most: Floats
    value: Floats
    gradient: Floats


class Between(NamedTuple):
    """The least that a stage between any two ideals, or levels of ideals, takes; in ms for a microbatch.

    - `forward`, `input`, `weight`: [ideals, ideals], F, I and W of the nodes between them
    - `value`, `gradient`: [ideals], how long a value, and a gradient, that crosses a cut there keeps a device busy
    - `nested`: bool [ideals, ideals], whether the first is a subset of the second, or the same one
    - `allowed`: bool [ideals, ideals], whether a stage may lie between them
    """

    forward: Floats
    input: Floats
    weight: Floats
    value: Floats
    gradient: Floats
    nested: Bools
    allowed: Bools
