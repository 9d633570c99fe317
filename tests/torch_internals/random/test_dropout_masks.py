"""Multiplying by a mask equals dropout to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxsplit.torch_internals.random.dropout_masks import dropout_mask, find_mask, multiply_by_mask
from fxsplit.torch_internals.random.seeded_calls import SeededCall, take_turn

CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "module": (nn.Dropout(0.3), ()),
    "in place": (nn.Dropout(0.3, inplace=True), ()),
    "rows": (nn.Dropout1d(0.3), ()),
    "channels": (nn.Dropout2d(0.3), ()),
    "function": (F.dropout, (0.3,)),
    "all": (F.dropout, (1.0,)),
    "none": (F.dropout, (0.3, False)),
    "operator": (torch.ops.aten.dropout.default, (0.3, True)),
    "older": (torch.dropout, (0.3, True)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
def test_the_product_is_the_dropout(name: str, memory: torch.memory_format) -> None:
    call, more = CALLS[name]
    x = torch.randn(4, 3, 5, 2).to(memory_format=memory)
    if isinstance(call, nn.Dropout1d):
        x = x[0]
    draw = SeededCall("node", call)
    found = []
    for way in (draw, lambda *args: multiply_by_mask(draw, *args)):
        leaf = x.clone().requires_grad_()
        with take_turn(5, 2, [x.device]):
            result = way(leaf * 1.0, *more)
        result.square().sum().backward()
        found.append((result.detach(), leaf.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_dropouts_that_are_no_product_are_not_known() -> None:
    hooked = nn.Dropout(0.3)
    hooked.register_forward_hook(lambda *_: None)
    for call in (nn.AlphaDropout(0.3), F.alpha_dropout, nn.LSTM(2, 2, dropout=0.1, num_layers=2), "bernoulli_", hooked):
        assert find_mask(call) is None
    for call in (nn.Dropout(0.1), F.dropout2d):
        assert find_mask(call) is not None


def test_the_operator_is_sound() -> None:
    torch.library.opcheck(
        dropout_mask, (torch.randn(3, 4), 0.3, "dropout", "node"), test_utils=["test_schema", "test_faketensor"]
    )
