"""Sequences of other lengths than the example's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api import pipeline
from fxsplit.errors import InputError
from tests.models import FAST


class Sequences(nn.Module):
    """Decides by the length of its sequences, which only torch.export follows, for each length anew."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.0)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.embed(ids) + torch.arange(ids.shape[1], device=ids.device)[None, :, None] / 10
        if ids.shape[1] > 4:
            h = h + self.mix(h)
        h = self.drop(self.norm(h.transpose(1, 2)).transpose(1, 2))
        out: Tensor = self.head(h if mask is None else h * mask[..., None])
        return out


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def test_other_lengths_of_an_exported_model_are_compiled_on_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same weights where they are; gradients and running statistics are those of the unsplit model."""
    torch.manual_seed(0)
    model = Sequences().double()
    unsplit = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, unsplit))
    example = torch.ones(8, 6).long(), torch.ones(8, 6, dtype=torch.float64)
    options: Any = {"n_microbatches": 2, "passes": FAST, "loss_fn": cross_entropy, "example_inputs": example}
    with fxsplit.compile(model, 2, **options) as pipe:
        homes = [{id(p) for p in s.module.parameters()} for s in pipe.stages.stages]
        for length, rows in ((6, 8), (3, 8), (9, 5), (3, 4), (6, 2)):
            ids, mask = torch.randint(0, 20, (rows, length)), torch.rand(rows, length, dtype=torch.float64)
            found = pipe.step(ids, mask, target=ids)
            parts = zip(ids.chunk(2), mask.chunk(2), strict=True)
            expected = torch.zeros((), dtype=torch.float64)
            for i, m in parts:
                expected = expected + cross_entropy(unsplit(i, m), i) * (i.shape[0] / rows)
            expected.backward()
            torch.testing.assert_close(found, expected.detach())
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
            for name, value in unsplit.state_dict().items():
                torch.testing.assert_close(model.state_dict()[name], value)
        assert homes == [{id(p) for p in s.module.parameters()} for s in pipe.stages.stages]
        pipe.eval(), unsplit.eval()
        for length in (6, 4):
            ids, mask = torch.randint(0, 20, (4, length)), torch.rand(4, length, dtype=torch.float64)
            torch.testing.assert_close(pipe(ids, mask), unsplit(ids, mask))
        monkeypatch.setattr(pipeline, "MOST_SHAPES", 1)
        with pytest.raises(InputError, match=r"a graph for every shape, and \(\(5,\), \(5,\)\).* more than 2 of them"):
            pipe(torch.ones(2, 5).long(), torch.ones(2, 5, dtype=torch.float64))
