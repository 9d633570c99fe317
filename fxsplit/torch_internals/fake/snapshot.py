"""Detect and undo writes to tensors, by copies of their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fxsplit.torch_internals.fake.values import has_values
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors.sparse_layouts import list_parts


class Snapshot:
    """A copy of tensors' values, to detect later writes. For fake tensors it keeps only their version counters."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = [(t, *((0, t.detach().clone()) if has_values(t) else (t._version, None))) for t in tensors]

    def changed(self) -> list[Tensor]:
        """Return the tensors that have been written to since the snapshot was made."""
        return [t for t, version, value in self._kept if _differs(t, version, value)]

    def restore(self) -> None:
        """Restore the values of tensors that have changed. Fake tensors have no values."""
        with torch.no_grad():
            for tensor, version, value in self._kept:
                # Skip unchanged tensors: any write counts as a new version, and autograd may have saved the tensor.
                if value is None or not _differs(tensor, version, value):
                    continue
                # A tensor that was resized may have lost its memory.
                if tensor.shape != value.shape:
                    tensor.data = value.clone()
                tensor.copy_(value)


@contextmanager
def keep_values(tensors: Iterable[Tensor]) -> Iterator[Snapshot]:
    """Restore the values of tensors after the block, even if an interrupt ends it. Yields the snapshot."""
    snapshot = Snapshot(tensors)
    with restore_after(snapshot.restore):
        yield snapshot


def _differs(tensor: Tensor, version: int, value: Tensor | None) -> bool:
    """Return whether a tensor was written to since it had this version and this value (None for a fake tensor)."""
    if value is None:
        return tensor._version != version
    if tensor.shape != value.shape:
        return True
    pairs = zip(list_parts(tensor), list_parts(value), strict=True)
    return any(a.shape != b.shape or _has_other_values(a, b) for a, b in pairs)


def _has_other_values(tensor: Tensor, value: Tensor) -> bool:
    """Return whether two tensors of the same shape differ; NaN equals NaN."""
    # Compare values instead of versions, since some kernels (batch norm's) write without counting a version.
    return not torch.equal(tensor, value) and not bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())
