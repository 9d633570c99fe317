"""A loss function that changes between steps is looked at again; one that gets other sizes is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning
from fxsplit.runtime.loss.calls import Calls
from fxsplit.runtime.loss.trial import LossTrial
from tests.support.models import FAST, Mlp

WEIGHTS = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.1, 9.0]]).double()
LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 1, 0])


def average(o: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return (F.cross_entropy(o, t, reduction="none") * mask).sum() / mask.sum()


def add(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t, reduction="none").sum()


# Losses that read a changing value, by the number of the step, from 0.
CHANGING: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "a threshold": lambda o, t, i: average(o, t, t >= [0, 1, 2, 0][i]),
    "weights of classes": lambda o, t, i: F.cross_entropy(o, t, weight=WEIGHTS[i % 2]),
    "weights by hand": lambda o, t, i: average(o, t, WEIGHTS[i % 2][t]),
    "a label": lambda o, t, i: F.cross_entropy(o, t, ignore_index=[-100, 0, 1, -100][i]),
    "a mask at times": lambda o, t, i: average(o, t, t > 0) if i % 2 else F.cross_entropy(o, t),
    "a sum, and then a mean": lambda o, t, i: average(o, t, t != 1) if i > 1 else add(o, t.clone()),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_loss_that_changes_is_looked_at_again(name: str) -> None:
    """Once microbatches kept the weights by their counts of the first step."""
    now = [0]

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return CHANGING[name](outputs, target, now[0])

    torch.manual_seed(0)
    model, x = Mlp(6, width=8).double(), torch.randn(8, 8).double()
    unsplit = copy.deepcopy(model)
    with (
        fxsplit.compile(model, 2, loss_fn=loss_fn, n_microbatches=3, passes=FAST) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", FxsplitWarning)
        for i in range(4):
            now[0] = i
            expected = loss_fn(unsplit(x), LABELS)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, target=LABELS), expected.detach(), rtol=1e-12, atol=0)
            for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("sized", [False, True])
def test_other_rows_and_other_lengths_are_no_other_calls(sized: bool) -> None:
    """The exception is a mask of fixed sizes, which the count's code would contain."""

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        rows, length = target.shape
        mask = (target.reshape(rows * length) != -100).view(rows, length) if sized else target != -100
        return ((outputs[:, 0, None] - target).square() * mask).sum() / mask.sum()

    model, unsplit = Mlp(6, width=8).double(), Mlp(6, width=8).double()
    unsplit.load_state_dict(model.state_dict())
    with (
        fxsplit.compile(model, 2, loss_fn=loss_fn, n_microbatches=2, passes=FAST) as pipe,
        patch.object(LossTrial, "try_counts", autospec=True, side_effect=LossTrial.try_counts) as tried,
    ):
        for rows, length in [(8, 5), (8, 7), (6, 5), (5, 3)]:
            x, target = torch.randn(rows, 8).double(), torch.ones(rows, length, dtype=torch.int64)
            target[: rows // 3] = -100
            expected = loss_fn(unsplit(x), target).detach()
            torch.testing.assert_close(pipe.step(x, target=target), expected, rtol=1e-12, atol=0)
        assert tried.call_count == (4 if sized else 1)


def test_calls_with_outputs_and_what_is_made_of_them_are_not_heard() -> None:
    outputs, target = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 1, 1])

    def listen(factor: float, label: int, table: Tensor) -> Any:
        with Calls(outputs, (target,)) as calls:
            losses = F.cross_entropy(outputs * factor, target, reduction="none") * factor
            (losses * table[target] * (target != label)).sum()
        return calls.heard

    table = torch.ones(2)
    assert listen(1.0, 5, table) == listen(2.0, 5, table)
    assert len({listen(1.0, 5, table), listen(1.0, 6, table), listen(1.0, 5, torch.ones(2))}) == 3


def test_a_tensor_that_takes_the_place_of_another_one_is_heard() -> None:
    """Weights of classes that are made anew may get the address of those of an earlier step."""
    outputs, target, heard = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 1, 1]), set()
    for _ in range(8):
        with Calls(outputs, (target,)) as calls:
            F.cross_entropy(outputs, target, weight=torch.from_numpy(np.ones(2, "float32")))
        heard.add(calls.heard)
        del calls
    assert len(heard) == 8
