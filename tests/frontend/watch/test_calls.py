"""The changes of each call of a loss: named, distinguished from caches, and undone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.frontend.watch.calls import CallWatch
from tests.support.models import FAST, Mlp

SEEN: list[float] = []


class Counts:
    """A loss that grows with its calls, and keeps a table that it makes once."""

    def __init__(self) -> None:
        self.calls = 0
        self.table: float | None = None

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = 2.0
        return F.cross_entropy(outputs, target) * self.calls


class Remembers(nn.Module):
    """A loss with a buffer that follows it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, target)
        self.average.lerp_(loss.detach(), 0.1)
        return loss


def count_in_closure() -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Any]]:
    count = 0

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return F.cross_entropy(outputs, target)

    return loss, lambda: count


def make_losses() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Return losses that change something, by the name of the changed value, each with a reader of the value."""
    SEEN.clear()
    counts, remembers, bound, (closure, read) = Counts(), Remembers(), Counts(), count_in_closure()

    def logs(outputs: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, target)
        SEEN.append(loss.item())
        return loss

    return {
        r"its attribute 'calls' \(from 0 to 1, .*test_calls.py:\d+\)\.": (counts, lambda: counts.calls),
        "its buffer 'average'": (remembers, lambda: remembers.average.item()),
        "closure variable 'count'": (closure, read),
        r"global 'SEEN' \(from 0 items to 1": (logs, lambda: len(SEEN)),
        "its attribute 'calls'": (partial(bound.__call__), lambda: bound.calls),
    }


@pytest.mark.parametrize("what", make_losses())
def test_what_a_loss_changes_is_said_and_left_as_it_was(what: str) -> None:
    """Trial calls of the loss used to count as well, and there was no warning that microbatches are counted."""
    loss_fn, read = make_losses()[what]
    torch.manual_seed(0)
    model, x, y = Mlp().double(), torch.randn(8, 8).double(), torch.arange(8) % 3
    before = read()
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=loss_fn, n_microbatches=2, passes=FAST) as pipe:
        with pytest.warns(fxsplit.FxsplitWarning, match=f"loss_fn changes {what}") as said:
            pipe.step(x, target=y)
        assert len(said) == 1 and said[0].filename == __file__
        after = read()
        assert after == before + 2 or isinstance(loss_fn, Remembers)
    if isinstance(loss_fn, Remembers):
        twin = Remembers()
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            twin(model(part), target)
        assert after == pytest.approx(twin.average.item(), abs=1e-12)


def test_what_a_loss_reads_or_makes_once_is_no_change() -> None:
    weight, cache = [0.5], dict[str, float]()

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        if "w" not in cache:
            cache["w"] = weight[0] * 2
        return F.cross_entropy(outputs, target) * cache["w"]

    model, x, y = Mlp(), torch.randn(8, 8), torch.arange(8) % 3
    with (
        fxsplit.compile(model, 2, example_inputs=x, loss_fn=loss, n_microbatches=2, passes=FAST) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        torch.testing.assert_close(pipe.step(x, target=y), F.cross_entropy(model(x), y).detach())


def test_more_calls_than_two_are_put_back_too() -> None:
    loss = Counts()
    watch = CallWatch(loss)
    for _ in range(3):
        with watch.note():
            loss(torch.randn(2, 3), torch.tensor([0, 1]))
    assert [text.split(" (")[0] for text in watch.list_changes()] == ["its attribute 'calls'"]
    watch.put_back()
    assert loss.calls == 0 and loss.table is None
