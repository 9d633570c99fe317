"""Warnings of a module that no cut can divide, and that takes most of the time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxsplit
from fxsplit import IR
from fxsplit.api.compiler.heavy_modules import count_parts
from fxsplit.errors import FxsplitWarning
from tests.support.models import FAST
from tests.support.times import state_times


class Recurrent(nn.Module):
    """Has nearly all of its work in one module of torch's, which stays whole because of a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 64, num_layers=4, batch_first=True), nn.Linear(64, 3)
        self.lstm.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(x)[0])
        return result


def test_a_module_that_stands_in_the_way_is_named_unless_it_is_meant() -> None:
    """A poor plan must come with its reason."""
    x = torch.randn(8, 16, 8)
    state_times(lstm=20.0)
    with pytest.warns(FxsplitWarning, match=r"submodule 'lstm' \(LSTM\) is one node and takes \d\d% of the time"):
        fxsplit.compile(Recurrent(), 2, example_inputs=x, passes=FAST)
    fxsplit.compile(Recurrent(), 2, example_inputs=x, passes=f"leaf{{path=lstm}},{FAST}")


def test_a_heavy_module_that_a_pass_has_made_is_no_error() -> None:
    """It was looked for in the captured graph: AttributeError at the end of compile."""

    def replace_first(ir: IR) -> IR:
        gm = fx.GraphModule(ir.gm, copy.deepcopy(ir.gm.graph))
        node = next(n for n in gm.graph.nodes if n.op == "call_module")
        gm.add_submodule("made", copy.deepcopy(gm.get_submodule(node.target)))
        node.target = "made"
        return ir.rewrite(gm)

    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(8, 8)
    state_times(_0=30.0)
    chain = fxsplit.DEFAULT.before("profile", replace_first)
    with torch.no_grad(), fxsplit.compile(model, 2, example_inputs=x, passes=chain, inference=True) as pipe:
        torch.testing.assert_close(pipe(x), model(x))


def test_parts() -> None:
    assert [count_parts(m) for m in (nn.Linear(2, 2), nn.GRU(2, 2, num_layers=3), nn.MultiheadAttention(4, 2))] == [
        1,
        3,
        2,
    ]


class Attends(nn.Module):
    """A decoder of torch's that attends to its own input, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        result: Tensor = self.decoder(x, x, tgt_mask=mask, tgt_is_causal=True)
        return result


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@pytest.mark.parametrize(("build", "devices"), [(encoder, 4), pytest.param(Attends, 2, marks=pytest.mark.long)])
def test_torchs_transformers_are_cut_inside(build: Any, devices: int) -> None:
    """As one node each, they would leave four devices without a plan, and two without a gain."""
    model, x = build().double(), torch.randn(8, 5, 8, dtype=torch.float64)
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, devices, loss_fn=F.mse_loss, n_microbatches=4, passes=FAST) as pipe:
        pipe.step(x, target=x)
        F.mse_loss(unsplit(x), x).backward()
        assert len(pipe.stages) == devices and min(len(stage.nodes) for stage in pipe.plan.stages) > 10
        for p, q in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
