"""Constants of a graph follow the device that their stage is on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.torch_internals.graph_devices import move_constants
from tests.models import FAST


class Constants(nn.Module):
    """Makes tensors on the device of its inputs, in every way there is."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.a, self.b, self.branches = nn.Linear(8, 8), nn.Linear(8, 8), branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.shape[1] > 100:
            return x
        h = torch.tanh(self.a(x))
        if self.branches:
            h = h + torch.arange(8, device=x.device) + torch.zeros(8).to(x.device) + torch.full((8,), 2.0, device="cpu")
            with torch.autocast("cpu", torch.bfloat16):
                h = h * torch.ones(8, device=x.device)
            h = h.float()
        h = h.to(x.device, torch.float32) + x.new_ones(8) + h.to("cpu")
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize("branches", [False, True], ids=["symbolic_trace", "export"])
def test_constants_follow_their_stage(branches: bool) -> None:
    """Nothing names the device of the capture any more, so a stage runs elsewhere; the meta device is elsewhere."""
    model, x = Constants(branches), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        here = torch.device("meta")
        values = (x.to(here),)
        for stage in pipe.stages.stages:
            move_constants(stage.module, torch.device("cpu"), here)
            values = stage.module.to(here)(*values)
            assert all(v.device == here for v in values if isinstance(v, Tensor)) and "cpu')" not in stage.code
