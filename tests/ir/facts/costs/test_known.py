"""Earlier costs serve a model whose masks now select other entries, and no other model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import ProfileError
from tests.support.models import FAST


class Chosen(nn.Module):
    """Returns the mean loss of the labels that are not ignored, by a mask or by indices."""

    def __init__(self, width: int = 6, *, indices: bool = False, cut: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.indices, self.cut = indices, cut

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.last(torch.tanh(self.first(x[:, : self.cut])))
        loss = F.cross_entropy(scores, labels.clamp(min=0), reduction="none")
        chosen = torch.nonzero(labels >= 0)[:, 0] if self.indices else labels >= 0
        return (2 * loss[chosen]).mean()


def make_batch(ignored: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    labels = torch.arange(rows) % 3
    labels[1 : 1 + ignored] = -100
    return torch.randn(rows, 4), labels


@pytest.mark.parametrize("indices", [False, True])
def test_costs_serve_a_batch_of_which_another_part_is_chosen(indices: bool) -> None:
    """A run that continued with the costs of its checkpoint used to be refused, as if these were of another model."""
    options: dict[str, Any] = {"n_microbatches": 1, "passes": FAST}
    first = fxsplit.compile(Chosen(indices=indices), ["cpu"] * 2, example_inputs=make_batch(2), **options)
    again = fxsplit.compile(
        Chosen(indices=indices), ["cpu"] * 2, example_inputs=make_batch(5), costs=first.costs, **options
    )
    assert again.plan.stages == first.plan.stages and again.costs.nodes == first.costs.nodes
    batch = make_batch(3)
    torch.testing.assert_close(again.step(*batch), again.model(*batch).detach())


@pytest.mark.parametrize("model", [Chosen(7), Chosen(cut=3), Chosen(indices=True)])
def test_costs_of_another_model_are_refused(model: nn.Module) -> None:
    costs = fxsplit.compile(Chosen(), ["cpu"] * 2, example_inputs=make_batch(2), n_microbatches=1).costs
    if isinstance(model, Chosen) and model.cut == 3:
        model.first = nn.Linear(3, 6)
    with pytest.raises(ProfileError, match="the saved profile is of another model"):
        fxsplit.compile(model, ["cpu"] * 2, example_inputs=make_batch(5), costs=costs, n_microbatches=1)


def test_costs_of_another_size_of_microbatch_are_refused() -> None:
    costs = fxsplit.compile(Chosen(), ["cpu"] * 2, example_inputs=make_batch(2), n_microbatches=1).costs
    with pytest.raises(ProfileError, match="the saved profile is of another model"):
        fxsplit.compile(Chosen(), ["cpu"] * 2, example_inputs=make_batch(4, rows=10), costs=costs, n_microbatches=1)
