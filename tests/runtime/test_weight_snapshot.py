"""Weights that change between a forward and its backward: named, and never silently the wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import fxsplit
from fxsplit.errors import BackwardError, ChangedWeightError
from fxsplit.runtime.stage.recompute import Policy
from tests.support.models import FAST

RECOMPUTE = ("never", "plan", "except_last", "always")


class Shifted(nn.Module):
    """Two layers with batch norm, and a buffer that forward() only reads."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.a(x)))
        out: Tensor = self.c(torch.tanh(self.b(h) * self.shift))
        return out


def compile_it(model: nn.Module, x: Tensor, recompute: Policy, **options: Any) -> fxsplit.Pipeline:
    options = {"passes": FAST, **options}
    return fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, recompute=recompute, **options)


def write(model: Shifted) -> None:
    with torch.no_grad():
        model.b.weight.mul_(2)


def swap(model: Shifted) -> None:
    model.b.weight.data = model.b.weight.data * 2


def replace(model: Shifted) -> None:
    model.b.weight = nn.Parameter(model.b.weight.detach() * 2)


def shift(model: Shifted) -> None:
    model.shift.mul_(2)


@pytest.mark.parametrize("change", [write, swap, replace, shift])
def test_a_stage_that_recomputes_refuses_other_weights(change: Callable[[Shifted], None]) -> None:
    """Once its gradients belonged to the new weights. torch notices only some of these changes."""
    model, x = Shifted(), torch.randn(8, 4)
    name = "shift" if change is shift else r"b\.weight"
    for recompute in ("always", "except_last"):
        with compile_it(model, x, recompute) as pipe:
            out = pipe(x)
            change(model)
            with pytest.raises(
                ChangedWeightError, match=f"'{name}' has changed since the pipeline's forward, and stage"
            ):
                out.sum().backward()
            # The next call uses the new weights, and no gradient of this call remains.
            assert all(p.grad is None for p in model.parameters())
            unsplit = copy.deepcopy(model)
            pipe(x).sum().backward()
            unsplit(x[:4]).sum().backward()
            unsplit(x[4:]).sum().backward()
            for mine, other in zip(model.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad)
            model.zero_grad()


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_what_eager_training_refuses_is_refused_by_name(recompute: Policy) -> None:
    model, x = Shifted(), torch.randn(8, 4)
    with compile_it(model, x, recompute) as pipe:
        for _ in range(2):
            out, eager = pipe(x), model(x)
            write(model)
            with pytest.raises(RuntimeError, match="inplace"):
                eager.sum().backward()
            with pytest.raises(ChangedWeightError, match=r"'b\.weight' has changed .* after backward\(\)") as raised:
                out.sum().backward()
            assert isinstance(raised.value, RuntimeError), "as torch's own"
            model.zero_grad()


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_an_input_that_is_written_to_is_named(recompute: Policy) -> None:
    """As a buffer for batches is that the next batch is copied into. A recomputing stage once took that batch."""
    model, x = Shifted(), torch.randn(8, 4)
    with compile_it(model, x, recompute) as pipe:
        out, eager = pipe(x), model(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            eager.sum().backward()
        model.zero_grad()
        with pytest.raises(BackwardError, match=r"^argument 'x' has been written to .* after backward\(\), or"):
            out.sum().backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_weight_that_is_frozen_before_the_backward_is_named(recompute: Policy) -> None:
    """Torch's own words for it were "One of the differentiated Tensors does not require grad"."""
    model, x = Shifted(), torch.randn(8, 4)
    with compile_it(model, x, recompute) as pipe:
        out = pipe(x)
        model.b.requires_grad_(False)
        with pytest.raises(
            ChangedWeightError, match=r"^'b\.weight' wanted a gradient .* wants none now: set requires_"
        ):
            out.sum().backward()
        assert all(p.grad is None for p in model.parameters())
        out = pipe(x)
        model.b.requires_grad_(True)
        out.sum().backward()
        assert model.b.weight.grad is None and model.a.weight.grad is not None


class OfSigns(nn.Module):
    """Reads only the signs of its input, so that no backward needs the input itself; may write to it."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.writes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.mul_(3)
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x.sign())))))
        return out


@pytest.mark.parametrize(("recompute", "writes"), [("never", False), ("always", True)])
def test_an_input_that_no_backward_reads_may_be_written_to(recompute: Policy, writes: bool) -> None:
    """Of one that the model itself writes to the pipeline has a copy."""
    model, x = OfSigns(writes=writes), torch.randn(8, 4)
    unsplit = copy.deepcopy(model)
    with compile_it(model, x, recompute) as pipe:
        out = pipe(x)
        unsplit(x.clone()).sum().backward()
        x.neg_()
        out.sum().backward()
        for mine, other in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("recompute", ["never", "plan"])
def test_a_change_that_no_backward_sees_is_none(recompute: Policy) -> None:
    """The weight of the first layer is not kept: its input wants no gradient."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4)
    unsplit = copy.deepcopy(model)
    with compile_it(model, x, recompute) as pipe:
        for each, run in ((model, pipe), (unsplit, unsplit)):
            out = run(x)
            with torch.no_grad():
                each.get_parameter("0.weight").mul_(2)
            out.sum().backward()
        for mine, other in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.filterwarnings("ignore:deferred_batch_norm=True changes nothing")  # a spectral norm is no batch norm
def test_what_forwards_write_is_no_change(recompute: Policy, deferred: bool) -> None:
    """Batch norm's statistics and a spectral norm's vectors change in a second forward."""
    x = torch.randn(8, 4)
    normal = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))
    for model, passes in ((Shifted(), FAST), (normal, f"leaf{{path=0}},{FAST}")):
        unsplit = copy.deepcopy(model)
        with compile_it(model, x, recompute, deferred_batch_norm=deferred, passes=passes) as pipe:
            (pipe(x).sum() + pipe(x * 2).sum()).backward()
            if not deferred:
                sum(unsplit(part).sum() for part in (x[:4], x[4:], 2 * x[:4], 2 * x[4:])).backward()
                for mine, other in zip(model.parameters(), unsplit.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_an_optimizer_in_a_hook_steps_after_the_backward(recompute: Policy) -> None:
    """A hook runs once for each weight, when its sum is there, and not between the microbatches."""
    model, x = Shifted(), torch.randn(8, 4)
    for weight in model.parameters():
        sgd = torch.optim.SGD([weight], lr=0.1)

        def step(_: Tensor, sgd: torch.optim.Optimizer = sgd) -> None:
            sgd.step()
            sgd.zero_grad()

        weight.register_post_accumulate_grad_hook(step)
    with compile_it(model, x, recompute, loss_fn=nn.functional.mse_loss) as pipe:
        for _ in range(2):
            before = [p.clone() for p in model.parameters()]
            pipe.step(x, target=torch.zeros(8, 4))
            pipe(x).sum().backward()
            changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
            assert changed.count(True) >= 5 and all(p.grad is None for p in model.parameters())
