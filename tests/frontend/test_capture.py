"""Models that cannot be captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from tests.support.models import FAST
from tests.support.refusals import refused


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Random(nn.Module):
    """Draws a Python number while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(8, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.a(x) * self.calls
        return result


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x).sum(dim=0)
        return result


def test_models_that_cannot_be_captured() -> None:
    with refused(TraceError, "the graph of Random computes output 0 differently from the model"):
        fxsplit.compile(Random(), 2, example_inputs=x())


def test_a_sum_over_rows_is_added_up() -> None:
    """Once a model that returns other than rows was refused, sums and means too."""
    model, batch = Sums(), x()
    with fxsplit.compile(model, 2, example_inputs=batch, n_microbatches=2) as pipe:
        torch.testing.assert_close(pipe(batch), model(batch))


def test_a_model_that_raises_by_itself_says_on_what() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        fxsplit.compile(model, 2, example_inputs=x(4), n_microbatches=4)
    assert "not on microbatches of 1" in str(caught.value) and "n_microbatches=1" in str(caught.value)


class Tangent(nn.Module):
    """Adds a derivative in forward mode to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y, slope, *_ = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        return torch.as_tensor(y + slope)


def test_derivatives_in_forward_mode_are_named_and_right_in_a_submodule() -> None:
    """The error used to be torch's own, about dimensions and proxies."""
    batch = torch.randn(4, 8)
    with pytest.raises(TraceError, match=r"Tangent takes derivatives by itself.*test_capture\.py.*into a submodule"):
        fxsplit.compile(Tangent(), 2, example_inputs=batch, n_microbatches=2, passes=FAST)
    model = nn.Sequential(nn.Linear(8, 8), Tangent(), nn.Linear(8, 3))
    passes = f"leaf{{path=1}},{FAST}"
    with fxsplit.compile(model, 2, example_inputs=batch, n_microbatches=2, passes=passes) as pipe:
        torch.testing.assert_close(pipe(batch), model(batch))


class ChecksLabels(nn.Module):
    """Refuses labels that are no classes, as Hugging Face's models for CTC do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.b(self.a(x))
        if labels is None:
            return logits
        if labels.max() >= 3:
            raise ValueError("labels are too large")
        return nn.functional.cross_entropy(logits, labels), logits


def test_a_loss_that_looks_at_labels_may_be_computed_in_loss_fn() -> None:
    batch = {"x": x(4), "labels": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(TraceError, match=r"or call ChecksLabels without labels, and compute the loss .* in loss_fn"):
        fxsplit.compile(ChecksLabels(), 2, example_inputs=batch, n_microbatches=2, passes=FAST)
