"""A zero gradient stays zero through a division by zero, and every other gradient is torch's own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxsplit.torch_internals.autograd.zero_gradients import keep_zeros

LABELS = torch.tensor([0, 0, 0])
NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "quotient": lambda x, mask: (x.sum(1) * mask).sum() / mask.sum(),
    "scaled": lambda x, mask: -0.5 * ((x.sum(1) * mask).sum() / mask.sum()).reshape(1).clone(),
    "two quotients": lambda x, mask: (x[:, 0] * mask).sum() / mask.sum() + (x[:, 1] * mask).sum() / mask.sum(),
    "means": lambda x, mask: (x.mean(1) * mask).mean() / mask.mean(),
    "class weights": lambda x, mask: F.cross_entropy(x, LABELS, weight=torch.stack([mask.max(), *torch.ones(2)])),
    "plain": lambda x, mask: x.square().mean(),
}


def differentiate(number: Tensor, x: Tensor, gradient: float, keeps: bool) -> Tensor:
    if keeps:
        keep_zeros([number])
    (found,) = torch.autograd.grad(number, x, torch.full_like(number, gradient))
    return found


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("counted", [0.0, 1.0])
@pytest.mark.parametrize("gradient", [0.0, 0.7])
def test_zero_comes_through_and_all_else_is_as_before(kind: str, counted: float, gradient: float) -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float32).reshape(3, 3).requires_grad_()
    mask = torch.full((3,), counted)
    plain = differentiate(NUMBERS[kind](x, mask), x, gradient, keeps=False)
    kept = differentiate(NUMBERS[kind](x, mask), x, gradient, keeps=True)
    if not gradient:
        assert bool(plain.isnan().any()) == (not counted and kind != "plain")
        assert not kept.any()
    else:
        torch.testing.assert_close(kept, plain, rtol=0, atol=0, equal_nan=True)


def test_what_has_no_number_is_left_alone() -> None:
    leaf, rows = torch.ones((), requires_grad=True), torch.ones(3, requires_grad=True) * 2
    keep_zeros([leaf, rows, torch.ones(())])
    assert not leaf._backward_hooks and torch.autograd.grad(rows.sum(), rows)[0].tolist() == [1.0] * 3


def test_nothing_is_kept_alive() -> None:
    """A hook that holds its own node holds the activations for ever."""
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True)
        held: Any = x * 2
        number = held.sum() / torch.zeros(())
        gone = weakref.ref(held)
        keep_zeros([number])
        torch.autograd.grad(number, x, torch.zeros(()))
        del held, number
        assert gone() is None
    finally:
        gc.enable()
