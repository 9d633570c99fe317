"""A graph captured for one shape, compared with the model on another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fxsplit.frontend.capture import CaptureOptions, capture
from fxsplit.frontend.other_shapes import fit_to_shapes
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.capture.scope import Scope


class ByLength(nn.Module):
    """Takes another branch for long sequences, and divides by the length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) if x.shape[1] > 8 else self.b(x)
        return x / x.shape[1]


def sequences(length: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, length, 4)


@pytest.mark.parametrize(("length", "fits"), [(3, True), (8, True), (9, False)])
def test_a_graph_fits_where_it_is_the_model(length: int, fits: bool) -> None:
    model = ByLength()
    ir = capture(model, (sequences(5),), {}, 3)
    found = fit_to_shapes(ir, model, Call((sequences(length),), {}), 3, CaptureOptions())
    assert (found is not None) == fits
    if found is not None:
        assert found.gm is ir.gm and found[Scope].inputs.specs[0].shape == (6, length, 4)
        found[Scope].check_rows([3, 2])


def test_the_model_has_the_last_word() -> None:
    """A graph that torch.export calls right is compared with the model all the same."""
    model = ByLength()
    ir = capture(model, (sequences(5),), {}, 3)
    trusting = ir.learn(replace(ir[Scope], guard=lambda *tensors: None))
    assert fit_to_shapes(trusting, model, Call((sequences(4),), {}), 3, CaptureOptions()) is not None
    assert fit_to_shapes(trusting, model, Call((sequences(9),), {}), 3, CaptureOptions()) is None
    before = [p.clone() for p in model.parameters()]
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))


CALLS = 0


class Counts(ByLength):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:forward.* changes global 'CALLS'")
def test_what_forward_counts_is_as_before() -> None:
    """Only capturing put back globals that forward() writes, and the next call then compiled again."""
    model = Counts()
    ir = capture(model, (sequences(5),), {}, 3)
    assert fit_to_shapes(ir, model, Call((sequences(3),), {}), 3, CaptureOptions()) is not None and CALLS == 0
