"""What tensors and arrays hold at one moment, to be compared with what they hold later.

A graph keeps what forward() computed of `self.table` while it was traced. A later write to the table makes no other
object of it, so what the object holds is compared.
"""

from __future__ import annotations

import array
import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxsplit.torch_internals.fake.fake_weights import has_values
from fxsplit.torch_internals.nn.objects import is_a

MOST_BYTES = 2**20
"""An array that is larger is not compared: nobody counts the writes to it, so that would take long."""
MOST_READ = 2**16
"""A tensor in host memory that is larger is compared only where it has been written to."""
MOST_COPIED = 2**24
"""Of a tensor that is larger there is no copy: a write to it counts as a change, whatever it wrote."""


class Contents:
    """What `holder`, a tensor or an array, held when this was made, once `keep` was called."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self._version = _count_writes(holder)
        self._copy: Any = None

    def keep(self) -> Contents:
        """Copy what the holder holds, and return this."""
        if self._copy is None and _can_be_copied(self.holder):
            is_tensor = isinstance(self.holder, Tensor)
            self._copy = self.holder.detach().clone() if is_tensor else copy.copy(self.holder)
        return self

    def matches(self, later: Contents) -> bool:
        """Return whether the same holder held the same when `later` was made, which need not keep it."""
        if self.holder is not later.holder:
            return False
        if self._version is not None and self._version == later._version and not _is_quickly_read(self.holder):
            return True
        now = later.holder if later._copy is None else later._copy
        if self._copy is None or not _are_equal(self._copy, now):
            return False
        # It was written to, and holds the same: asking once will do.
        self._version = later._version if later._copy is None else self._version
        return True

    def moves_to(self, holder: Any) -> bool:
        """Return whether `holder` holds what was kept of another tensor or array, and take it for the holder then."""
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
        """Let the holder hold again what was kept of it."""
        if self._copy is None:
            return
        if isinstance(self.holder, Tensor):
            self.holder.detach().copy_(self._copy)
        else:
            # The rows of an array, or all of an array without dimensions.
            self.holder[... if isinstance(self.holder, np.ndarray) else slice(None)] = self._copy

    def __repr__(self) -> str:
        """Return what was held, on one line."""
        kept = self.holder if self._copy is None else self._copy
        return " ".join(repr(kept).split())


def has_contents(value: Any) -> bool:
    """Return whether a value is a tensor, or an array of numbers that is not too large."""
    if is_a(value, np.ndarray):
        return not value.dtype.hasobject and value.nbytes <= MOST_BYTES
    return is_a(value, Tensor) or (is_a(value, (bytearray, array.array)) and len(value) <= MOST_BYTES)


def _is_quickly_read(holder: Tensor) -> bool:
    """Return whether comparing what a tensor holds takes no longer than a call of torch."""
    # Writes through .data, or through an array of numpy's that shares the memory, are not counted.
    size = holder.numel() * holder.element_size()
    return holder.device.type == "cpu" and _is_ordinary(holder) and size <= MOST_READ


def _count_writes(holder: Any) -> int | None:
    """Return how often a tensor was written to; None where nobody counts."""
    return holder._version if isinstance(holder, Tensor) and not holder.is_inference() else None


def _is_ordinary(holder: Tensor) -> bool:
    """Return whether a tensor is dense and has values, which torch can compare; others may hold anything."""
    plain = type(holder) in (Tensor, torch.nn.Parameter) and holder.layout is torch.strided
    return plain and not holder.is_nested and not holder.is_quantized and has_values(holder)


def _can_be_copied(holder: Any) -> bool:
    """Return whether there is something to copy, and not too much."""
    if not isinstance(holder, Tensor):
        return True
    return _is_ordinary(holder) and holder.numel() * holder.element_size() <= MOST_COPIED


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two tensors or two arrays hold the same; what is no number equals itself here."""
    if not isinstance(a, Tensor):
        if isinstance(a, (bytearray, array.array)):
            return bool(a == b)
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
