"""The autograd node that a pipeline's outputs hang on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import fxsplit
from fxsplit.runtime.autograd_node import PipelineFunction
from tests.support.models import FAST, Mlp


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_second_derivatives_are_refused() -> None:
    """It would be wrong if create_graph silently gave a gradient without a graph."""
    x = vectors().requires_grad_()
    with (
        fxsplit.compile(Mlp(), 2, passes=FAST) as pipe,
        pytest.raises(RuntimeError, match="cannot be differentiated again"),
    ):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)


def test_a_node_hands_gradients_to_the_backward_it_was_given() -> None:
    """Outputs are the tensors that the pipeline made; unwanted ones want no gradient, and unused ones give None."""
    asked: list[Sequence[Tensor | None]] = []

    def backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        asked.append(gradients)
        return [torch.full((2,), 7.0), None]

    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    made = [torch.ones(2), torch.zeros(2), torch.arange(2)]
    out, other, plain = PipelineFunction.apply(backward, made, [True, True, False], x, w)  # type: ignore[no-untyped-call]
    assert (
        out.requires_grad and other.requires_grad and not plain.requires_grad and out.data_ptr() == made[0].data_ptr()
    )
    (out * 3).sum().backward()
    ((first, second, third),) = asked
    assert first is not None and first.tolist() == [3, 3] and second is None and third is None
    assert x.grad is not None and x.grad.tolist() == [7, 7] and w.grad is None
