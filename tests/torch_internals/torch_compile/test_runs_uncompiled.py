"""Calls that are replaced in the function of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxsplit.torch_internals.torch_compile.runs_uncompiled import RunsUncompiled, call_apart, replace_calls
from tests.runtime.stage.one_stage import whole_stage


class Doubling(RunsUncompiled):
    row_dims = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.inner(x) * 2


def test_calls_are_replaced_in_a_method_of_the_same_module() -> None:
    held = Doubling()
    module = whole_stage(held).module
    x = torch.randn(3, 2)
    function = replace_calls(module, {"inner": lambda held, value: held(value) + 1})
    torch.testing.assert_close(function(x), held(x) + 1)
    # A weight that is replaced later is the one that is read.
    held.inner.weight = nn.Parameter(torch.zeros(2, 2))
    torch.testing.assert_close(function(x), held(x) + 1)
    torch.testing.assert_close(module(x), held(x))
    assert replace_calls(module, {})(x).equal(held(x))


def test_what_is_called_apart_tells_where_it_has_rows() -> None:
    held, x = Doubling(), torch.ones(3, 2)
    result = call_apart(held, x)
    assert torch.equal(result, held(x)) and result._dynamo_weak_dynamic_indices == {0}
