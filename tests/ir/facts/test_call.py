"""Arguments of a call and their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxsplit
from tests.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Two(nn.Module):
    """Two layers; `narrow` sends a model to torch.export, since it decides by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def narrow(self, x: Tensor) -> None:
        if x.shape[-1] != 4:
            raise ValueError("four features")


def test_names_of_arguments_that_begin_alike() -> None:
    class Masks(Two):
        def forward(self, x: Tensor, mask: Tensor, mask_bias: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x) + mask) + mask_bias
            return out

    class Listed(Two):
        def forward(self, x: list[Tensor], x_0: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x[0]) + x_0)
            return out

    masks, listed, call = Masks(), Listed(), (rows(), torch.randn(4), rows())
    with fxsplit.compile(masks, 2, chunks={"mask": fxsplit.Replicate}, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe(*call), masks(*call))
    with fxsplit.compile(listed, 2, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe([call[0]], call[2]), listed([call[0]], call[2]))
