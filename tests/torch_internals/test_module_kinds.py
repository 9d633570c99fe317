"""Layers by their kind."""

from __future__ import annotations

import pytest
from torch import nn

from fxsplit.torch_internals.module_kinds import is_batch_norm, is_dropout


@pytest.mark.parametrize("module", [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()])
def test_batch_norms(module: nn.Module) -> None:
    assert is_batch_norm(module) and not is_dropout(module)


@pytest.mark.parametrize("module", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_dropouts(module: nn.Module) -> None:
    assert is_dropout(module) and not is_batch_norm(module)


@pytest.mark.parametrize("other", [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Linear(1, 1), None])
def test_others(other: object) -> None:
    assert not is_batch_norm(other) and not is_dropout(other)
