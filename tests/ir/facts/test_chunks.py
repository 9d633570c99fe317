"""Arguments without a common batch dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit import FxsplitError
from fxsplit.errors import InputError


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def refused(error: type[Exception], message: str) -> Any:
    """Expect `error`, a FxsplitError of one paragraph."""
    assert issubclass(error, FxsplitError)
    return pytest.raises(error, match=message)


def test_inputs_without_a_common_batch() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            result: Tensor = self.a(x) * mask
            return result

    with refused(InputError, r"argument 'mask' has shape \(1, 8\) and 'x' has 8 rows: state whether"):
        fxsplit.compile(Two(), 2, example_inputs=(x(), torch.ones(1, 8)))
    with refused(InputError, "without any tensor"):
        fxsplit.compile(Two(), 2, example_inputs=(1, 2))
