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


class Prices(NamedTuple):
    """The time of the stage between any two ideals, as differences of sums; float64 [ideals], in ms for a microbatch.

    - `forward`, `input`, `weight`: F, I and W of all nodes inside
    - `reduce`: the parameters of all nodes inside, once over a link; r replicas sum their gradients in
      4 (r - 1) / r times that (see `price_split`)
    - `value`, `gradient`: how long a value, and a gradient, that crosses a cut after the ideal keeps a device busy
    - `nested`: bool [ideals, ideals], whether the first is a subset of the second
    """

    forward: Floats
    input: Floats
    weight: Floats
    reduce: Floats
    value: Floats
    gradient: Floats
    nested: Bools
