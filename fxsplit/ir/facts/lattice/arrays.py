"""Arrays of facts: facts are immutable, so their arrays are read-only."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class ReadOnlyArrays:
    """Base of frozen dataclasses; replaces their arrays by read-only views."""

    def __post_init__(self) -> None:
        """Replace each array by a view that numpy refuses to write to."""
        own: Any = self
        for field in fields(own):
            array = getattr(self, field.name, None)
            if isinstance(array, np.ndarray):
                # A view, so that the maker of the array may still write to it.
                locked = array.view()
                locked.setflags(write=False)
                object.__setattr__(self, field.name, locked)
