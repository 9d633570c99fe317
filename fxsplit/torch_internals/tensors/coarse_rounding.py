"""Perturb results in coarser dtypes than the model's weights by one rounding error, to measure its effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.thread_modes import enter_dispatch_mode

EXACT = {"clone", "cat", "stack", "copy_", "index", "index_select", "gather", "embedding", "constant_pad_nd"}
"""Operators that only move values. `_to_copy` is not among them: it rounds if it converts to another dtype."""
SEED = 0


def find_eps(dtype: torch.dtype) -> float:
    """Return the rounding error (eps) of a floating or complex dtype, 0.0 for any other dtype."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


class CoarseRounding(TorchDispatchMode):
    """Multiplies each result in a dtype coarser than `dtype` by 1 + eps or 1 - eps of its own dtype.

    eps: an attribute, the coarsest eps met so far.
    Whole numbers are not perturbed, since every dtype represents small whole numbers exactly: masks, zeros and counts
    have no rounding error.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._finest = find_eps(dtype)
        self._generator = torch.Generator().manual_seed(SEED)
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and perturb its result."""
        found = func(*args, **(kwargs or {}))
        # Higher-order operators such as torch.cond run operators themselves; views and prim operators compute no new
        # values.
        if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("prim", "c10d") or func.is_view:
            return found
        if func.overloadpacket.__name__ in EXACT:
            return found
        # An in-place operator must return the same object.
        if func._schema.is_mutable:
            pytree.tree_map_only(Tensor, lambda t: t.copy_(self._shake(t)) if self._is_coarse(t) else t, found)
            return found
        return pytree.tree_map_only(Tensor, lambda t: self._shake(t) if self._is_coarse(t) else t, found)

    def _is_coarse(self, tensor: Tensor) -> bool:
        """Return whether a tensor's dtype rounds more coarsely than the finest dtype, and record how coarsely."""
        eps = find_eps(tensor.dtype)
        if eps <= self._finest or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        self.eps = max(self.eps, eps)
        return True

    def _shake(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is off by one rounding error, up or down at random."""
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
        parts = torch.view_as_real(wide) if wide.is_complex() else wide
        up = torch.randint(0, 2, parts.shape, generator=self._generator).to(parts.device)
        off = parts * (1.0 + (2.0 * up - 1.0) * find_eps(tensor.dtype))
        # Keep whole numbers, and numbers that would overflow.
        off = torch.where((parts == parts.round()) | (off.abs() > torch.finfo(tensor.dtype).max), parts, off)
        shaken = torch.view_as_complex(off.contiguous()) if wide.is_complex() else off
        return torch.empty_like(tensor).copy_(shaken)


@contextmanager
def shake_coarse_parts(dtype: torch.dtype) -> Iterator[CoarseRounding]:
    """Inside the block, perturb results in a dtype coarser than `dtype`, on this thread.

    Compiled functions run uncompiled.
    """
    mode = CoarseRounding(dtype)
    with torch.compiler.set_stance("force_eager"), enter_dispatch_mode(mode):
        yield mode
