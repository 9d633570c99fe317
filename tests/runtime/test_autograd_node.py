"""The autograd node that a pipeline's outputs hang on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxsplit
from tests.models import FAST, Mlp


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_second_derivatives_are_refused() -> None:
    x = vectors().requires_grad_()
    with (
        fxsplit.compile(Mlp(), 2, passes=FAST) as pipe,
        pytest.raises(RuntimeError, match="cannot be differentiated again"),
    ):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)
