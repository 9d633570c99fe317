"""Fixtures that several proofs share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fxsplit.api.compiler import compiler as compiling
from fxsplit.api.compiler.lowering import capture_model


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return a list that receives each captured model, in order."""
    found: list[nn.Module] = []

    def noting(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.append(model)
        return capture_model(model, *args, **kwargs)

    monkeypatch.setattr(compiling, "capture_model", noting)
    return found
