"""Arrays of facts: facts do not change, and so nobody may write to their arrays."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class ReadOnlyArrays:
    """Base of frozen dataclasses whose arrays are read-only views of those that they are made of."""

    def __post_init__(self) -> None:
        """Replace each array by a view that numpy refuses to write to."""
        own: Any = self
        for field in fields(own):
            array = getattr(self, field.name, None)
            if isinstance(array, np.ndarray):
                # A view: whoever has made the array may still write to it.
                locked = array.view()
                locked.setflags(write=False)
                object.__setattr__(self, field.name, locked)
