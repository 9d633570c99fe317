"""Ask less of sizes that are symbols, while torch.export traces a model for any number of rows and other lengths.

With sizes that are numbers a question such as "is this tensor contiguous?" costs nothing. With symbols each question is
algebra, and one of a padded and chunked length takes milliseconds. A loop over slices, as in linear attention, asks
thousands of them. Four kinds are left out here, none of which changes what is computed:

- Torch remembers what an operator made of which kinds of arguments. To make a view from this memory it asks more than
  the operator itself does, and asks again each time. So views of symbolic sizes are made by their operators.
- Torch remembers the last 256 answers only, so that a second layer with more questions asks all of them again.
- Torch notes of each value in which memory format it is contiguous, which nothing here reads.
- Torch does not know how long the chunks of a padded length are. Here they have their length, a number.
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
    """Let torch trace with fewer questions to symbolic sizes in the block; what it records computes the same."""
    with (
        patch_method(FakeTensorMode, "dispatch", lambda dispatch: partial(_make_views_afresh, dispatch)),
        # The answers are kept until the block ends; the next block starts without any.
        patch_method(ShapeEnv, "_inner_evaluate_expr", cache),
        patch_method(proxy_tensor, "_extract_tensor_metadata", lambda read: partial(read, include_contiguity=False)),
        # A block of another thread has what sympy remembers of this one, which is true there too.
        patch_method(FloorDiv, "eval", lambda divide: partial(divide_by_count, divide)),
    ):
        yield


def _make_views_afresh(
    dispatch: Method, mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Run an operator on fake tensors, without torch's memory if it makes a view of symbolic sizes."""
    if not (mode.cache_enabled and _is_symbolic_view(func, args)):
        return dispatch(mode, func, types, args, kwargs)
    with disable_fake_tensor_cache(mode):
        return dispatch(mode, func, types, args, kwargs)


def _is_symbolic_view(func: Any, args: Any) -> bool:
    """Return whether an operator makes a view of a tensor whose sizes or strides are symbols."""
    # Every operator that makes a view takes the tensor first.
    of_views = isinstance(func, torch._ops.OpOverload) and func.is_view
    return of_views and bool(args) and isinstance(args[0], Tensor) and args[0]._has_symbolic_sizes_strides
