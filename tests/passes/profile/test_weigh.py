"""What operators allocate, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.passes.profile.weigh import Weight


class Once(torch.autograd.Function):
    """Doubles; its backward runs once for each forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2.0
        out: Tensor = x * ctx.factor
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        factor = ctx.factor
        del ctx.factor
        out: Tensor = gradient * factor
        return out


def weigh(module: nn.Module, x: Tensor, turns: int, *, once: bool) -> tuple[Weight, int]:
    """Return what is noted of a module, and how often it was run for that: `turns` at most."""
    weight, runs = Weight(), 0
    leaf = x.requires_grad_()
    while runs < turns and (runs == 0 or weight.is_unfinished):
        with weight.note_forward():
            out = module(leaf)
        weight.note_backward([Once.apply(out) if once else out], [leaf, *module.parameters()])  # type: ignore[no-untyped-call]
        runs += 1
    return weight, runs


def test_a_backward_that_runs_once_is_weighed_whole_and_in_halves() -> None:
    """Once both ran on one graph, and a function that frees what it keeps failed in the second."""
    layer, x = nn.Linear(512, 512), torch.randn(64, 512)
    plain, _ = weigh(layer, x, 9, once=False)
    found, runs = weigh(layer, x, 9, once=True)
    assert runs == 2, "the gradient of the weight can be left for later, so there are two ways"
    doubled = 64 * 512 * 4
    assert found.backward_peak_bytes == plain.backward_peak_bytes + doubled
    assert found.halved_peak_bytes == plain.halved_peak_bytes + doubled
    assert found.backward_peak_bytes >= 512 * 512 * 4 > found.halved_peak_bytes


def test_an_operator_of_which_nothing_can_wait_runs_once() -> None:
    found, runs = weigh(nn.Tanh(), torch.randn(64, 512), 9, once=True)
    assert runs == 1
    assert found.halved_peak_bytes == found.backward_peak_bytes > 0
    assert found.waiting_bytes == 0


def test_gradients_of_views_are_weighed_in_both_layouts() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp().t()

    _, runs = weigh(Turned(), torch.randn(64, 512), 9, once=False)
    assert runs == 2
