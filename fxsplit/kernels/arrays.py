"""Growing arrays, for kernels that cannot know sizes beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def grown(array: Any, size: int) -> Any:
    """Return a copy of the one-dimensional `array` with room for `size` elements."""
    bigger = np.empty(size, array.dtype)
    bigger[: array.size] = array
    return bigger
