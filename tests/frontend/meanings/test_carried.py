"""Buffers through which a microbatch changes the outputs of the next one: named, unless no output depends on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import FxsplitWarning
from fxsplit.frontend.meanings.carried import find_carried_buffer
from tests.frontend.subjects import make_subject
from tests.support.models import FAST

Change = Callable[["Cools", Tensor], Tensor]


class Cools(nn.Module):
    """Counts its calls in a buffer, and uses the count as `change` says."""

    calls: Tensor

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.a, self.b, self.change = nn.Linear(4, 6), nn.Linear(6, 3), change
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.change(self, torch.tanh(self.a(x)))
        result: Tensor = self.b(h)
        return result


def anneal(model: Cools, h: Tensor) -> Tensor:
    model.calls.add_(1)
    return h / (1 + model.calls)


def count(model: Cools, h: Tensor) -> Tensor:
    model.calls.add_(1)
    return h


def read(model: Cools, h: Tensor) -> Tensor:
    return h / (1 + model.calls)


@pytest.mark.parametrize(("change", "found"), [(anneal, "calls"), (count, None), (read, None)])
def test_only_what_outputs_follow_from_counts(change: Change, found: str | None) -> None:
    model = Cools(change)
    subject = make_subject(model, torch.randn(8, 4), rows=4)
    with subject.make_runnable(8) as here:
        assert find_carried_buffer(here, (4, 2)) == found
    assert model.calls == 0


def test_statistics_of_batch_norms_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with make_subject(model, torch.randn(8, 4), rows=4).make_runnable(8) as here:
        assert find_carried_buffer(here, (4, 2)) is None


def test_the_buffer_is_named_where_batches_are_cut() -> None:
    """A temperature fell as many times faster as a batch has microbatches, and nothing said so."""
    x = torch.randn(8, 4)
    with (
        pytest.warns(
            FxsplitWarning, match="Cools writes buffer 'calls', and its outputs depend on that buffer"
        ) as said,
        fxsplit.compile(Cools(anneal), 2, example_inputs=x, n_microbatches=2, passes=FAST),
    ):
        assert len(said) == 1 and said[0].filename == __file__
    model, twin = Cools(anneal), Cools(anneal)
    twin.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, passes=FAST) as pipe:
            for _ in range(3):
                torch.testing.assert_close(pipe(x), twin(x))
