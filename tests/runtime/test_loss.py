"""Losses of microbatches: weighed by their rows, with parameters and draws of their own."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError, StageError
from tests.models import FAST, Mlp

mse = F.mse_loss


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


def test_a_loss_without_a_graph_is_refused() -> None:
    for loss_fn, frozen in ((lambda o, t: mse(o.detach(), t), False), (mse, True)):
        model = Mlp().requires_grad_(not frozen)
        with (
            fxsplit.compile(model, 2, loss_fn=loss_fn, passes=FAST) as pipe,
            pytest.raises(InputError, match="does not depend on anything that wants a gradient"),
        ):
            pipe.step(vectors(), target=torch.zeros(8, 3))


def test_reduction_bound_by_partial() -> None:
    model = Mlp()
    x, y = vectors(7), torch.randint(0, 3, (7,))
    loss_fn = partial(F.cross_entropy, reduction="sum")
    with fxsplit.compile(model, 2, n_microbatches=3, loss_fn=loss_fn, passes=FAST) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y), loss_fn(model(x), y).detach())


class WeightedLoss(nn.Module):
    """A loss with a parameter of its own, and a penalty on one of the model's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.penalised = [weight]

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return mse(outputs, target) * self.scale + 0.1 * self.penalised[0].square().mean()


def test_the_parameters_of_a_loss_are_trained_once() -> None:
    model = Mlp()
    loss_fn = WeightedLoss(model.get_parameter("layers.0.weight"))
    unsplit, calls = copy.deepcopy(model), []
    other = WeightedLoss(unsplit.get_parameter("layers.0.weight"))
    x, y = vectors(), torch.randn(8, 3)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=4, loss_fn=loss_fn, passes=FAST) as pipe:
        loss_fn.scale.register_hook(lambda g: calls.append(float(g)))
        assert pipe.step(x, target=y) == pytest.approx(other(unsplit(x), y).item(), rel=1e-5)
        other(unsplit(x), y).backward()
        torch.testing.assert_close(loss_fn.scale.grad, other.scale.grad)
        for mine, its in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        with pytest.raises(StageError):
            pipe.step(x, target=torch.full((8, 4), 1.0))
        torch.testing.assert_close(loss_fn.scale.grad, other.scale.grad)
        assert other.scale.grad is not None
        assert calls == [pytest.approx(other.scale.grad.item())], "once, on the sum"


def test_a_loss_that_draws_is_reproducible() -> None:
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.5))]
    model = nn.Sequential(*layers)
    x, y = torch.randn(256, 32), torch.randn(256, 32)

    def noisy(outputs: Tensor, target: Tensor) -> Tensor:
        return mse(outputs, target + torch.randn_like(target))

    found = set()
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=32, loss_fn=noisy, passes=FAST) as pipe:
        for _ in range(5):
            torch.manual_seed(1)
            found.add(float(pipe.step(x, target=y)))
    assert len(found) == 1


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_uneven_microbatches_weigh_by_their_rows(dtype: torch.dtype) -> None:
    model = deep().to(dtype)
    x, y = torch.randn(7, 8, dtype=dtype), torch.randn(7, 8, dtype=dtype)
    alone = copy.deepcopy(model)
    expected = F.mse_loss(alone(x), y)
    expected.backward()
    with fxsplit.compile(model, 2, loss_fn=mean_square, n_microbatches=3, passes=FAST) as pipe:
        found = pipe.step(x, target=y)
    assert found.dtype == dtype and not found.requires_grad
    torch.testing.assert_close(found, expected.detach())
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_loss_that_is_a_parameter_itself() -> None:
    """Its gradient is the weight it has in the batch; nothing else gets one."""
    model = deep()
    extra = nn.Parameter(torch.tensor(3.0))
    with fxsplit.compile(model, 2, loss_fn=lambda outputs, target: extra, n_microbatches=4, passes=FAST) as pipe:
        loss = pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    assert float(loss) == 3.0 and float(extra.grad) == 1.0  # type: ignore[arg-type]
    assert all(p.grad is None for p in model.parameters())
