"""How a user's loss function reduces rows: by a mean, by a sum, or in a way that microbatches cannot follow."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning
from tests.support.accelerator import use_accelerator
from tests.support.models import FAST, Mlp


def make_batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(rows, 8).double(), torch.arange(rows) * 5 % 3


class Scaled(nn.Module):
    """A loss with a parameter in single precision, and dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.tensor(2.0)), nn.Dropout(0.0)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.drop(self.scale * F.cross_entropy(outputs, target, reduction="sum"))
        return loss


MEANS: dict[str, Any] = {
    "cross entropy": F.cross_entropy,
    "a lambda": lambda o, t: F.cross_entropy(o, t),
    "tokens": lambda o, t: F.nll_loss(o.log_softmax(1), t) * 0.5,
    "mean squares": lambda o, t: (o - t[:, None]).square().mean(),
    "smoothed": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.2),
    "ignoring": lambda o, t: F.cross_entropy(o, t, None, None, 0),
    "ignoring, a module": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), ignore_index=0),
    "ignoring, bound": partial(F.nll_loss, ignore_index=1),
}
SUMS: dict[str, Any] = {
    "summed": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "over a constant": lambda o, t: F.cross_entropy(o, t, reduction="sum") / 20,
    "times the rows": lambda o, t: F.cross_entropy(o, t) * len(t),
    "a module": Scaled(),
    "squares": lambda o, t: (o - t[:, None]).square().sum(),
}


@pytest.mark.parametrize("rows", [10, 3])
@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_a_step_has_the_loss_and_gradients_of_the_whole_batch(name: str, rows: int) -> None:
    """Once a function without `reduction` was averaged, also one that adds up: gradients were too small."""
    loss_fn, model = (MEANS | SUMS)[name], Mlp().double()
    unsplit, (x, y) = copy.deepcopy(model), make_batch(rows)
    with fxsplit.compile(model, 2, loss_fn=loss_fn, n_microbatches=3, passes=FAST) as pipe:
        for _ in range(2):
            expected = loss_fn(unsplit(x), y)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, target=y), expected.detach())
            for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, t: (o @ o.T).logsumexp(1).mean(),
        lambda o, t: o.norm(),
        lambda o, t: F.cross_entropy(o, t).exp(),
        lambda o, t: F.cross_entropy(o, t, ignore_index=0) + o.square().mean(),
        lambda o, t: o.view(4, 3).square().mean(),
    ],
)
def test_a_loss_that_microbatches_do_not_make_is_said_once(loss_fn: Any) -> None:
    x, y = make_batch(16)
    with fxsplit.compile(Mlp().double(), 2, loss_fn=loss_fn, n_microbatches=4, passes=FAST) as pipe:
        with pytest.warns(FxsplitWarning, match=r"loss_fn is no mean over rows and no sum.*n_microbatches=1") as said:
            pipe.step(x, target=y)
        assert said[0].filename == __file__
        pipe.step(x, target=y)
    with fxsplit.compile(Mlp().double(), 2, loss_fn=loss_fn, n_microbatches=1, passes=FAST) as pipe:
        pipe.step(x[:4], target=y[:4])


def test_a_loss_that_calls_a_pipeline_is_told_what_to_call() -> None:
    """Once the warning named a private class. The unsplit model is the one that such a loss may call."""
    x, _ = make_batch(12)
    pupil = Mlp().double()
    with fxsplit.compile(Mlp().double(), 2, passes=FAST) as teacher:
        wanted = teacher.model(x).detach()
        for call in (teacher, teacher.model):
            loss_fn = lambda o, t, call=call: F.mse_loss(o, call(t).detach())  # noqa: E731
            with (
                fxsplit.compile(pupil, 2, loss_fn=loss_fn, n_microbatches=4, passes=FAST) as pipe,
                warnings.catch_warnings(record=True) as said,
            ):
                warnings.simplefilter("always")
                torch.testing.assert_close(pipe.step(x, target=x), F.mse_loss(pupil(x), wanted).detach())
            texts = " ".join(str(w.message) for w in said)
            assert ("call pipe.model here, which is the unsplit model" in texts) == (call is teacher), texts
            assert "in force" not in texts and "_Averages" not in texts


def test_a_loss_that_draws_or_keeps_state_is_left_as_it_was() -> None:
    norm = nn.BatchNorm1d(3, affine=False).double()
    x, y = make_batch(12)

    def noisy(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs + torch.randn_like(outputs), target)

    for loss_fn in (noisy, lambda o, t: F.mse_loss(norm.eval()(o), torch.zeros_like(o))):
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            model = Mlp().double()
            with fxsplit.compile(model, 2, loss_fn=loss_fn, n_microbatches=3, passes=FAST) as pipe:
                torch.manual_seed(1)
                found.append((float(pipe.step(x, target=y)), torch.get_rng_state().sum().item()))
        assert found[0] == found[1]
    assert not norm.num_batches_tracked


def test_a_loss_of_zero_is_looked_at_again() -> None:
    """Zeros are the mean and the sum of zeros: nothing is concluded from them."""
    open_at_first = [0.0]

    def hinge(outputs: Tensor, target: Tensor) -> Tensor:
        return (F.relu(outputs - 100 + open_at_first[0])).sum()

    model, (x, y) = Mlp().double(), make_batch(8)
    with fxsplit.compile(model, 2, loss_fn=hinge, n_microbatches=2, passes=FAST) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.step(x, target=y) == 0
        open_at_first[0] = 200.0
        torch.testing.assert_close(pipe.step(x, target=y), hinge(model(x), y).detach())


class Flagged(Mlp):
    """Returns its output, and a mask of its positive entries."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y > 0


def balance(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss with a second term scaled to the size of its first."""
    a, b = F.cross_entropy(outputs, target), outputs.abs().mean()
    return a + b * (a / b).detach()


def test_a_gradient_that_compares_rows_is_said() -> None:
    """The value is a mean over rows, so there was no warning, although gradients differed from the whole batch's."""
    model, (x, y) = Mlp().double(), make_batch(8)
    with fxsplit.compile(model, 2, loss_fn=balance, n_microbatches=2, passes=FAST) as pipe:
        with pytest.warns(FxsplitWarning, match="the gradient of loss_fn compares rows") as said:
            pipe.step(x, target=y)
        assert len(said) == 1 and said[0].filename == __file__
    model.zero_grad()
    with fxsplit.compile(model, 2, loss_fn=balance, n_microbatches=1, passes=FAST) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(x, target=y)
        weight = next(model.parameters())
        wanted = torch.autograd.grad(balance(model(x), y), weight)[0]
        torch.testing.assert_close(weight.grad, wanted)


def test_other_gradients_are_no_reason_to_warn() -> None:
    """Losses that write to their arguments, ignore an output, require float32, or contain maxima."""
    single = torch.ones(3)

    def writes(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs.mul_(2.0), target)

    losses: list[Any] = [
        writes,
        lambda o, t: F.relu(o - 0.1).mean() + o.max(1).values.mean(),
        lambda o, t: (o.float() * single).sum(1).mean(),
        lambda o, t: F.multi_margin_loss(o, t),
    ]
    models = [*((Mlp(), loss_fn) for loss_fn in losses), (Flagged(), lambda o, t: (o[0] * o[1]).mean())]
    for model, loss_fn in models:
        x, y = make_batch(8)
        with (
            fxsplit.compile(model.double(), 2, loss_fn=loss_fn, n_microbatches=2, passes=FAST) as pipe,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            pipe.step(x, target=y)


class Several(nn.Module):
    """Logits, all pairs of rows, and a number of the batch that `of_batch` makes of the logits."""

    def __init__(self, of_batch: Any = Tensor.mean) -> None:
        super().__init__()
        self.a, self.b, self.of_batch = nn.Linear(8, 8), nn.Linear(8, 3), of_batch

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h: Tensor = self.b(torch.tanh(self.a(x)))
        return h, h @ h.T, self.of_batch(h)


NOT_MADE: dict[str, tuple[Any, Any]] = {
    "pairs": (Tensor.mean, lambda o, t: F.cross_entropy(o[1], torch.arange(len(t)))),
    "pairs of a microbatch": (Tensor.mean, lambda o, t: F.cross_entropy(o[1], torch.arange(len(o[1])))),
    "rows and pairs": (Tensor.mean, lambda o, t: F.cross_entropy(o[0], t) + 0.1 * o[1].square().mean()),
    "a mean and a sum": (Tensor.sum, lambda o, t: F.cross_entropy(o[0], t) + 0.1 * o[2]),
    "a sum and a mean": (Tensor.mean, lambda o, t: F.cross_entropy(o[0], t, reduction="sum") + o[2]),
    "the root of a sum": (lambda h: h.square().sum(), lambda o, t: o[2].sqrt()),
    "a power of a mean": (Tensor.mean, lambda o, t: F.cross_entropy(o[0], t) + o[2].exp()),
    "an unjoined number": (Tensor.norm, lambda o, t: F.cross_entropy(o[0], t) + o[2]),
}
MADE: dict[str, tuple[Any, Any]] = {
    "a mean and a mean": (Tensor.mean, lambda o, t: F.cross_entropy(o[0], t) + 0.1 * o[2]),
    "a sum and a sum": (Tensor.sum, lambda o, t: F.cross_entropy(o[0], t, reduction="sum") + o[2]),
    "rows alone": (Tensor.norm, lambda o, t: F.cross_entropy(o[0], t)),
    "a sum over a count": (
        lambda h: torch.tensor(h.shape[0] * h.shape[1]),
        lambda o, t: F.cross_entropy(o[0], t, reduction="sum") / o[2],
    ),
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_a_loss_of_outputs_without_rows_is_said(name: str) -> None:
    """Once a contrastive loss trained on pairs within microbatches, and a sum next to a mean was too small."""
    of_batch, loss_fn = NOT_MADE[name]
    x, y = make_batch(16)
    with fxsplit.compile(Several(of_batch).double(), 2, loss_fn=loss_fn, n_microbatches=4, passes=FAST) as pipe:
        with pytest.warns(FxsplitWarning, match=r"loss_fn is no mean over rows and no sum.*n_microbatches=1"):
            pipe.step(x, target=y)
        pipe.step(x, target=y)


@pytest.mark.parametrize("rows", [10, 3])
@pytest.mark.parametrize("name", MADE)
def test_a_loss_of_outputs_without_rows_may_be_that_of_the_whole_batch(name: str, rows: int) -> None:
    of_batch, loss_fn = MADE[name]
    model, (x, y) = Several(of_batch).double(), make_batch(rows)
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, loss_fn=loss_fn, n_microbatches=3, passes=FAST) as pipe:
        expected = loss_fn(unsplit(x), y)
        expected.backward()
        torch.testing.assert_close(pipe.step(x, target=y), expected.detach())
        for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("place", ["cpu", "toy:0", "toy:1"])
def test_labels_are_found_on_whichever_device_a_loss_is_computed(place: str) -> None:
    """Tensors of two devices were compared, so the labels were not found, and the loss was averaged by rows."""
    torch.manual_seed(0)
    model, x, labels = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(15, 8), torch.randint(0, 3, (15,))
    labels[2:9] = -100
    alone = copy.deepcopy(model)
    expected = F.cross_entropy(alone(x), labels)
    expected.backward()

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs.to(place), target.to(place))

    with use_accelerator():
        options: Any = {"n_microbatches": 4, "example_inputs": x.to("toy:0"), "passes": FAST, "loss_fn": loss_fn}
        with fxsplit.compile(model.to("toy:0"), ["toy:0", "toy:1"], **options) as pipe:
            loss = pipe.step(x.to("toy:0"), target=labels)
        torch.testing.assert_close(loss.cpu(), expected.detach())
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.cpu(), its.grad)


CHANGED: dict[str, Any] = {
    "clamped": lambda o, t: F.cross_entropy(o, t.clamp(min=0)),
    "filled": lambda o, t: F.cross_entropy(o, t.masked_fill(t == -100, 2)),
    "other classes": lambda o, t: F.cross_entropy(o, t.clamp(max=1), torch.tensor([1.0, 2.0, 9.0]).double()),
    "moved and ignored": lambda o, t: F.cross_entropy(o, torch.where(t == -100, -7, t), ignore_index=-7),
    "one more class": lambda o, t: F.cross_entropy(o, F.one_hot(t.clamp(min=0), 3).argmax(1)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_labels_that_a_loss_changes_are_no_count_although_the_first_microbatch_has_none_of_them(name: str) -> None:
    """Once such a loss was averaged by labels that are not ignored, without a word."""
    model, x = Mlp(6, width=8).double(), torch.randn(8, 8).double()
    y = torch.tensor([0, 1, 0, -100, 2, -100, 1, -100])
    if name == "other classes":
        y = torch.tensor([0, 1, 2, 1, 2, 2, 0, 1])
    expected = CHANGED[name](copy.deepcopy(model)(x), y).detach()
    with (
        fxsplit.compile(model, ["cpu"] * 2, n_microbatches=4, loss_fn=CHANGED[name], passes=FAST) as pipe,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        found = pipe.step(x, target=y)
    close = abs(float(found - expected)) < 1e-12
    # Averages that microbatches do not make are said, as ever.
    assert close or any("no mean over rows" in str(w.message) for w in said)
    assert close or name not in ("clamped", "filled", "one more class")
