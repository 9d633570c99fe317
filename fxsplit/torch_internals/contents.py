"""Snapshots of the values of tensors and arrays, to detect later writes.

If forward() reads `self.table` while it is traced, the graph contains a result that was computed from the table. A
later write may change the table in place, so it is not enough to compare object identities: the values are compared.
"""

from __future__ import annotations

import array
import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.nn.objects import is_a

MOST_BYTES = 2**20
"""Arrays larger than this are not compared: nobody counts writes to arrays, so comparing takes long."""
MOST_READ = 2**16
"""Tensors in host memory larger than this are compared only if their version shows a write."""
MOST_COPIED = 2**24
"""Tensors larger than this are not copied: any write counts as a change, whatever it wrote."""


class Contents:
    """The values of `holder`, a tensor or an array, when this snapshot was made. Values are copied only by `keep`."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self._version = _count_writes(holder)
        self._copy: Any = None

    def keep(self) -> Contents:
        """Copy the holder's values, and return this snapshot."""
        if self._copy is None and _can_be_copied(self.holder):
            is_tensor = isinstance(self.holder, Tensor)
            self._copy = self.holder.detach().clone() if is_tensor else copy.copy(self.holder)
        return self

    def matches(self, later: Contents) -> bool:
        """Return whether the same holder had the same values when `later` was made. `later` may be without a copy."""
        if self.holder is not later.holder:
            return False
        if self._version is not None and self._version == later._version and not _is_quickly_read(self.holder):
            return True
        now = later.holder if later._copy is None else later._copy
        if self._copy is None or not _are_equal(self._copy, now):
            return False
        # The same values were written again. Remember the version, so that the values are compared only once.
        self._version = later._version if later._copy is None else self._version
        return True

    def moves_to(self, holder: Any) -> bool:
        """Return whether another tensor or array holds the copied values.

        If so, that object becomes this snapshot's holder.
        """
        later = Contents(holder)
        if holder is self.holder:
            return self.matches(later)
        if self._copy is None or type(holder) is not type(self.holder) or not _can_be_copied(holder):
            return False
        wants = (isinstance(h, Tensor) and h.requires_grad for h in (self.holder, holder))
        if len(set(wants)) > 1 or not _are_equal(self._copy, holder):
            return False
        self.holder, self._version = holder, later._version
        return True

    def put_back(self) -> None:
        """Write the copied values back to the holder."""
        if self._copy is None:
            return
        if isinstance(self.holder, Tensor):
            self.holder.detach().copy_(self._copy)
        else:
            # Write all rows of an array, or the only value of an array without dimensions.
            self.holder[... if isinstance(self.holder, np.ndarray) else slice(None)] = self._copy

    def __repr__(self) -> str:
        """Return the values on one line."""
        kept = self.holder if self._copy is None else self._copy
        return " ".join(repr(kept).split())


def has_contents(value: Any) -> bool:
    """Return whether a value is a tensor, or an array of numbers that is small enough to compare."""
    if is_a(value, np.ndarray):
        return not value.dtype.hasobject and value.nbytes <= MOST_BYTES
    return is_a(value, Tensor) or (is_a(value, (bytearray, array.array)) and len(value) <= MOST_BYTES)


def _is_quickly_read(holder: Tensor) -> bool:
    """Return whether comparing a tensor's values takes no longer than a call of torch."""
    # Writes through .data, or through a numpy array that shares the memory, do not change the version.
    size = holder.numel() * holder.element_size()
    return holder.device.type == "cpu" and _is_ordinary(holder) and size <= MOST_READ


def _count_writes(holder: Any) -> int | None:
    """Return how often a tensor was written to, or None if torch does not count its writes."""
    return holder._version if isinstance(holder, Tensor) and not holder.is_inference() else None


def _is_ordinary(holder: Tensor) -> bool:
    """Return whether a tensor is dense and has values that torch can compare."""
    plain = type(holder) in (Tensor, torch.nn.Parameter) and holder.layout is torch.strided
    return plain and not holder.is_nested and not holder.is_quantized and has_values(holder)


def _can_be_copied(holder: Any) -> bool:
    """Return whether a holder can be copied and is small enough."""
    if not isinstance(holder, Tensor):
        return True
    return _is_ordinary(holder) and holder.numel() * holder.element_size() <= MOST_COPIED


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two tensors or two arrays hold the same values; NaN equals NaN."""
    if not isinstance(a, Tensor):
        if isinstance(a, (bytearray, array.array)):
            return bool(a == b)
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
