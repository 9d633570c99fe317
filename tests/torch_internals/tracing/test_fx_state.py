"""State that torch.fx changes while it traces: found in the installed torch, and restored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace as symbolic

from fxsplit.torch_internals.tracing.fx_state import find_tracing_flag, leave_nothing_of_fx


class Looks(nn.Module):
    """Notes, when it is called, whether torch.fx says that it traces."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        holder, name = find_tracing_flag()
        self.seen.append(getattr(holder, name))
        return x + 1


def test_the_flag_is_where_torch_keeps_it() -> None:
    """torch 2.14 moved it: symbolic tracing then followed no model, and all were exported in its place."""
    model = Looks()
    fx.Tracer().trace(model)
    holder, name = find_tracing_flag()
    assert model.seen == [True] and getattr(holder, name, False) is False


def test_what_a_trace_that_was_cut_off_has_left_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Module.__call__
    with leave_nothing_of_fx():
        # Begin a trace that never ends.
        patcher = symbolic._Patcher()
        monkeypatch.setattr(symbolic, "CURRENT_PATCHER", patcher)
        patcher.patch_method(nn.Module, "__call__", lambda *args: None, deduplicate=False)
        setattr(*find_tracing_flag(), True)
        assert nn.Module.__call__ is not own and symbolic.is_fx_symbolic_tracing()
    assert nn.Module.__call__ is own and not symbolic.is_fx_symbolic_tracing() and symbolic.CURRENT_PATCHER is None
    torch.testing.assert_close(nn.Identity()(torch.ones(2)), torch.ones(2))
