"""step(atomic=False): gradients join a `.grad` that is there already while the step runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.schedule.generators.catalogue import ScheduleName


class Net(nn.Module):
    """Layers with large and small weights; the first one's is used once more at the end, in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(160, 160)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(160, 160), nn.Tanh()) for _ in range(4)])
        self.last = nn.Linear(160, 160)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return a row of 160 numbers for each row."""
        found: Tensor = self.last(self.layers(torch.tanh(self.first(x))))
        return found


@contextmanager
def make(schedule: ScheduleName = "1F1B") -> Iterator[tuple[nn.Module, Any, Tensor, Tensor]]:
    """Yield a model in float64, a pipeline of it on two devices, and a batch."""
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(8, 160).double(), torch.randn(8, 160).double()
    with fxsplit.compile(
        model, ["cpu"] * 2, example_inputs=x, n_microbatches=4, loss_fn=F.mse_loss, schedule=schedule
    ) as pipe:
        yield model, pipe, x, y


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "Chimera"])
def test_gradients_are_those_of_two_backwards(schedule: ScheduleName) -> None:
    with make(schedule) as (model, pipe, x, y):
        unsplit = copy.deepcopy(model)
        for _ in range(3):
            pipe.step(x, target=y, atomic=False)
            F.mse_loss(unsplit(x), y).backward()
            for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_there_stays_the_same_tensor() -> None:
    with make() as (model, pipe, x, y):
        pipe.step(x, target=y)
        before = [(p.grad, p.grad.data_ptr()) for p in model.parameters() if p.grad is not None]
        pipe.step(x, target=y, atomic=False)
        after = [(p.grad, p.grad.data_ptr()) for p in model.parameters() if p.grad is not None]
        assert all(a is b and one == other for (a, one), (b, other) in zip(before, after, strict=True))


def test_hooks_see_the_sum_of_the_step() -> None:
    with make() as (model, pipe, x, y):
        weight = model.get_parameter("layers.0.0.weight")
        pipe.step(x, target=y)
        assert weight.grad is not None
        alone, seen = weight.grad.clone(), list[Tensor]()
        weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        pipe.step(x, target=y, atomic=False)
        torch.testing.assert_close(seen[0], alone)
        assert len(seen) == 1
        torch.testing.assert_close(weight.grad, 2 * alone)


def compute_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squares; raise for a target that is no number."""
    if torch.isnan(target).any():
        raise RuntimeError("on purpose")
    return F.mse_loss(outputs, target)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_that_fails(atomic: bool) -> None:
    """With atomic=False the error says that gradients may have changed; else none has."""
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(8, 160).double(), torch.randn(8, 160).double()
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, n_microbatches=4, loss_fn=compute_loss) as pipe:
        pipe.step(x, target=y)
        before = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        # Poison the last microbatch: its forward comes after backwards of earlier microbatches.
        y[-1] = torch.nan
        with pytest.raises(RuntimeError, match="on purpose") as caught:
            pipe.step(x, target=y, atomic=atomic)
        same = all(p.grad is not None and torch.equal(p.grad, b) for p, b in before.items())
        assert same is atomic
        assert any("atomic=False" in note for note in getattr(caught.value, "__notes__", [])) is not atomic
