"""verify() trains with the pipeline's own loss if a target is given, and the result names the loss."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.api.verify.verify import Verification
from fxsplit.errors import InputError
from tests.support.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 3}
X = torch.randn(11, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(11) % 3
# Microbatches have 0, 1 and 3 labels that count.
FEW = torch.cat([torch.full((7,), -100), LABELS[7:]])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def verify(loss_fn: Any, target: Any, model: nn.Module | None = None, **options: Any) -> Verification:
    with fxsplit.compile(model or make_net(), ["cpu"] * 2, loss_fn=loss_fn, **{**OPTIONS, **options}) as pipe:
        return fxsplit.verify(pipe, X, target=target)


def sharpen(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss that writes to its target, and needs the same dtype for both."""
    return torch.stack([outputs, target.mul_(2)]).std(0).mean()


class Distance(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return ((outputs - target) * self.scale).abs().sum(1).mean()


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (F.cross_entropy, LABELS),
        (F.cross_entropy, FEW),
        (nn.CrossEntropyLoss(weight=WEIGHTS), FEW),
        (nn.CrossEntropyLoss(weight=WEIGHTS).forward, LABELS),
        (functools.partial(F.cross_entropy, weight=WEIGHTS, reduction="sum"), LABELS),
        (sharpen, torch.ones(11, 3)),
        (Distance(), torch.ones(11, 3)),
    ],
)
def test_the_loss_of_the_pipeline_is_compared_in_float64(loss_fn: Any, target: Tensor) -> None:
    before = target.clone()
    found = verify(loss_fn, target)
    assert found.equal, found.offending
    assert found.dtype is torch.float64 and found.loss.startswith("loss_fn ")
    assert torch.equal(target, before), "the target is the user's"


def test_a_loss_with_tensors_of_its_own_in_float32_is_compared_in_that() -> None:
    def weighted(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target, weight=WEIGHTS)

    found = verify(weighted, LABELS)
    assert found.equal and found.dtype is torch.float32 and found.loss == "loss_fn 'weighted'"


def test_the_result_says_which_loss_it_is_of() -> None:
    assert verify(None, None).loss == "the sum of squares of the outputs"
    without = verify(F.cross_entropy, None)
    assert without.equal
    assert without.loss == "the sum of squares of the outputs, as no target was given for loss_fn 'cross_entropy'"


def test_what_compressing_changes_is_measured_with_the_loss_of_the_pipeline() -> None:
    torch.manual_seed(0)
    with fxsplit.compile(make_net(), ["cpu"] * 2, loss_fn=F.cross_entropy, compress="bf16", **OPTIONS) as pipe:
        own, squares = fxsplit.verify(pipe, X, target=LABELS).compression, fxsplit.verify(pipe, X).compression
    assert own is not None and squares is not None
    assert own.gradient != squares.gradient and str(own).endswith("for loss_fn 'cross_entropy'")
    assert "for the sum of squares of the outputs, as no target was given" in str(squares)


@pytest.mark.filterwarnings("ignore:loss_fn is no mean over rows and no sum")
def test_a_loss_that_microbatches_do_not_make_differs() -> None:
    """The unsplit model computes it from the whole batch."""

    def contrast(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    found = verify(contrast, LABELS)
    assert {d.kind for d in found.offending} == {"gradient"}
    assert verify(contrast, LABELS, n_microbatches=1).equal


def test_containers_of_the_model_reach_the_loss() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.a(x)
            return {"logits": self.b(hidden), "size": hidden.square().mean()}

    def loss(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs["logits"], target["labels"]) + 0.1 * outputs["size"]

    found = verify(loss, {"labels": LABELS}, Pair())
    assert found.equal, found.offending


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InputError, match="a target, and the pipeline has no loss_fn to take it: compile with loss_fn="):
        verify(None, LABELS)
    for target, loss_fn in ((LABELS[:7], F.cross_entropy), (torch.ones(5, 3), F.l1_loss)):
        with pytest.raises(InputError, match=r"target has shape \(.*\) and the batch has 11 rows"):
            verify(loss_fn, target)
    with pytest.raises(RuntimeError, match="multi-target not supported") as raised:
        verify(F.cross_entropy, LABELS[:, None])
    assert (
        raised.value.__notes__[-1] == "raised by loss_fn 'cross_entropy', for the outputs and the target of the batch"
    )

    def noisy(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs + torch.rand_like(outputs), target)

    with pytest.raises(InputError, match="loss_fn 'noisy' draws random numbers"):
        verify(noisy, torch.ones(11, 3))


def test_gradients_of_the_model_itself_stay_as_they_are() -> None:
    """Even if the loss reads the model's weights, which the copies do not share."""
    model = make_net()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)

    def decay(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs, target) + sum(w.square().sum() for w in model.parameters())

    with pytest.raises(InputError, match=r"loss_fn 'decay' reads weights of the model, such as '0\.weight'"):
        verify(decay, torch.ones(11, 3), model)
    assert all(w.grad is not None and torch.equal(w.grad, torch.ones_like(w)) for w in model.parameters())
