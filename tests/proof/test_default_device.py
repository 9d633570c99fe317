"""A default device, on made-up accelerators: a stage makes tensors without a device on the stage's own device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST


@torch.fx.wrap
def add_ones(x: Tensor) -> Tensor:
    """Add a tensor that each call makes without a device."""
    return x + torch.ones(x.shape[0], 8)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return add_ones(self.b(torch.tanh(add_ones(self.a(x)))))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_each_stage_has_the_default_device_for_itself(recompute: str) -> None:
    """Both stages used to make the tensor on the first stage's device, and the second stage failed."""
    model, x = Adds(), torch.randn(8, 8)
    unsplit = copy.deepcopy(model)
    expected = unsplit(x)
    expected.square().sum().backward()
    with use_accelerator():
        options = {"n_microbatches": 2, "passes": FAST, "recompute": recompute}
        here = x.to("toy:0")
        with (
            torch.device("toy:0"),
            fxsplit.compile(model.to("toy:0"), ["toy:0", "toy:1"], example_inputs=here, **options) as pipe,  # type: ignore[arg-type]
        ):
            out = pipe(here)
            out.square().sum().backward()
        found = [out.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    for value, same in zip(found, [expected, *(p.grad for p in unsplit.parameters())], strict=True):
        torch.testing.assert_close(value, same)
