"""The boundaries of stages for torch: shapes are checked, memory is contiguous, and torch detaches only aliases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fxsplit.errors import InputError
from fxsplit.torch_internals.torch_pipelining import StageTensors, build_module, enter_stage, leave_stage


def make_stage() -> fx.GraphModule:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.linear(x), y, x.t()

    return fx.symbolic_trace(Block())


def test_another_shape_is_refused() -> None:
    assert enter_stage(torch.zeros(2, 3), [2, 3], copies=False).shape == (2, 3)
    with pytest.raises(InputError, match=r"made for a microbatch of shape \[2, 3\] and gets \[1, 3\]"):
        enter_stage(torch.zeros(1, 3), [2, 3], copies=False)


def test_values_are_aliases_and_copies_where_they_are_written_to() -> None:
    value = torch.zeros(2, requires_grad=True)
    alias = enter_stage(value, [2], copies=False)
    assert alias is not value and alias.data_ptr() == value.data_ptr() and alias.grad_fn is not None
    assert enter_stage(value, [2], copies=True).data_ptr() != value.data_ptr()
    flags = torch.zeros(2, dtype=torch.bool)
    assert enter_stage(flags, [2], copies=False) is flags and leave_stage(flags) is flags


def test_gradients_and_outputs_are_contiguous() -> None:
    value = torch.randn(2, 3, requires_grad=True)
    left = leave_stage(value.t())
    assert left.is_contiguous() and torch.equal(left, value.t())
    seen: list[bool] = []
    alias = enter_stage(value, [2, 3], copies=False)
    value.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
    alias.backward(torch.randn(3, 2).t())
    assert seen == [True]


def test_a_module_keeps_names_and_gives_what_it_gave() -> None:
    stage = make_stage()
    x, y = torch.randn(2, 3), torch.arange(4)
    ends = StageTensors((x.to("meta"), y.to("meta")), ())
    module = build_module(stage, ends, copies=False)
    assert module.state_dict().keys() == stage.state_dict().keys()
    assert module.get_parameter("linear.weight") is stage.get_parameter("linear.weight")
    for mine, own in zip(module(x, y), stage(x, y), strict=True):
        assert torch.equal(mine, own) and mine.is_contiguous()
    # torch detaches outputs in place, which it may not do to a view.
    for output in module(x, y):
        output.detach_()
