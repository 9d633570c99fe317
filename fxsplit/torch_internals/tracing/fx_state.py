"""State of the process or thread that torch.fx changes while it traces a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.fx import _symbolic_trace as symbolic

from fxsplit.torch_internals.scopes.undo import restore_after


@contextmanager
def leave_nothing_of_fx() -> Iterator[None]:
    """Restore the state that torch.fx changes in the block, such as patches of nn.Module, even after an interrupt."""
    before = symbolic.CURRENT_PATCHER

    def put_back() -> None:
        patcher = symbolic.CURRENT_PATCHER
        if patcher is not None and patcher is not before:
            patcher.revert_all_patches()
            symbolic.CURRENT_PATCHER = before

    holder, name = find_tracing_flag()
    flag = getattr(holder, name, False)
    with restore_after(partial(setattr, holder, name, flag)), restore_after(put_back):
        yield


def find_tracing_flag() -> tuple[Any, str]:
    """Return the object and the attribute name of torch.fx's flag that says whether it is tracing."""
    # Since torch 2.14 the flag is per thread; before, it was global.
    own: Any = getattr(symbolic, "_is_fx_tracing_tls", None)
    return (symbolic, "_is_fx_tracing_flag") if own is None else (own, "flag")
