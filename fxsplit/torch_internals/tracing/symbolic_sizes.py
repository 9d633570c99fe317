"""Evaluate fewer symbolic expressions while torch.export traces a model with a dynamic number of rows and lengths.

With concrete sizes, a check such as "is this tensor contiguous?" costs nothing. With symbols each check is algebra, and
takes milliseconds for the length of a padded and chunked sequence. A loop over slices, as in linear attention, makes
thousands of checks. Four kinds are avoided here, without a change of the recorded computation:

- The fake tensor cache stores an operator's result by its arguments. For a view, a cache hit needs more checks than the
  operator itself, every time. So views with symbolic sizes bypass the cache.
- torch caches only the last 256 evaluated expressions, so a second layer with more checks evaluates all of them again.
  Here the cache is unbounded.
- torch records in which memory formats each value is contiguous. Nothing here reads that.
- torch does not know the length of the chunks of a padded length. Here the length becomes a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from fxsplit.torch_internals.scopes.patch import Method, patch_method
from fxsplit.torch_internals.tracing.whole_chunks import divide_by_count


@contextmanager
def ask_less_of_symbols() -> Iterator[None]:
    """Inside the block, reduce torch's checks of symbolic sizes. The recorded graph computes the same."""
    with (
        patch_method(FakeTensorMode, "dispatch", lambda dispatch: partial(_make_views_afresh, dispatch)),
        # The cache lasts until the block ends.
        patch_method(ShapeEnv, "_inner_evaluate_expr", cache),
        patch_method(proxy_tensor, "_extract_tensor_metadata", lambda read: partial(read, include_contiguity=False)),
        # sympy shares its own cache with blocks of other threads. The results hold there too.
        patch_method(FloorDiv, "eval", lambda divide: partial(divide_by_count, divide)),
    ):
        yield


def _make_views_afresh(
    dispatch: Method, mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Run an operator on fake tensors. Views with symbolic sizes bypass torch's cache."""
    if not (mode.cache_enabled and _is_symbolic_view(func, args)):
        return dispatch(mode, func, types, args, kwargs)
    with disable_fake_tensor_cache(mode):
        return dispatch(mode, func, types, args, kwargs)


def _is_symbolic_view(func: Any, args: Any) -> bool:
    """Return whether an operator makes a view of a tensor with symbolic sizes or strides."""
    # Every view operator takes the tensor as its first argument.
    of_views = isinstance(func, torch._ops.OpOverload) and func.is_view
    return of_views and bool(args) and isinstance(args[0], Tensor) and args[0]._has_symbolic_sizes_strides
