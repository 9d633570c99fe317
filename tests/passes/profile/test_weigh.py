"""The allocations of operators, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxsplit.passes.profile.weigh import OperatorMemory
from tests.support.programs import run


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


def weigh(module: nn.Module, x: Tensor, turns: int, *, once: bool) -> tuple[OperatorMemory, int]:
    """Return the weight of a module, and the number of its runs: at most `turns`."""
    weight, runs = OperatorMemory(), 0
    leaf = x.requires_grad_()
    while runs < turns and (runs == 0 or weight.is_unfinished):
        with weight.note_forward():
            out = module(leaf)
        weight.note_backward([Once.apply(out) if once else out], [leaf, *module.parameters()])  # type: ignore[no-untyped-call]
        runs += 1
    return weight, runs


def test_a_backward_that_runs_once_is_weighed_whole_and_in_halves() -> None:
    """Once both ran on one graph, and a function that frees its saved tensors failed in the second."""
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


def test_what_the_second_half_of_a_backward_allocates() -> None:
    found, _ = weigh(nn.Linear(512, 512, bias=False), torch.randn(64, 512), 9, once=False)
    assert found.late_peak_bytes == 512 * 512 * 4 and found.waiting_bytes == 64 * 512 * 4
    found, _ = weigh(nn.Tanh(), torch.randn(64, 512), 9, once=False)
    assert found.late_peak_bytes == 0


def test_gradients_in_the_memory_of_the_one_that_was_given() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x.detach()], 1)

    assert weigh(Joined(), torch.randn(4, 8), 9, once=False)[0].lent_bytes == 4 * 8 * 4, "a part of it"
    assert weigh(nn.Tanh(), torch.randn(4, 8), 9, once=False)[0].lent_bytes == 0


def test_a_gradient_that_arrives_turned_is_copied() -> None:
    """A convolution whose output is transposed took more than its profile said."""

    def find(*, turned: bool) -> float:
        weight, layer = OperatorMemory(is_turned=turned), nn.Conv1d(16, 16, 3, padding=1)
        x = torch.randn(8, 16, 64).requires_grad_()
        weight.note_backward([layer(x)], [x, *layer.parameters()])
        while weight.is_unfinished:
            weight.note_backward([layer(x)], [x, *layer.parameters()])
        return weight.backward_peak_bytes

    # Nearly: a GPU rounds each tensor up to 512 bytes.
    assert find(turned=True) >= find(turned=False) + 0.9 * 8 * 16 * 64 * 4


FREES = """
import torch
from torch import nn
from fxsplit.passes.profile.weigh import OperatorMemory
conv, x, weight = nn.Conv2d(64, 64, 3, bias=False), torch.randn(4, 64, 8, 8, requires_grad=True), OperatorMemory()
while weight._ways is None or weight.is_unfinished:
    copy = x.clone()  # the graph alone keeps it
    with weight.note_forward():
        out = conv(copy)
    del copy
    weight.note_backward([out], [x, conv.weight])
    del out
print(weight.late_peak_bytes > 0)
"""


def test_weighing_frees_nothing_that_was_there_before() -> None:
    """Once the second half freed tensors that the forward had saved, and torch printed a warning about it."""
    # torch prints it once in a process.
    assert run(FREES) == (0, "True\n", "")
