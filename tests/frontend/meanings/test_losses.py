"""Hand-written losses that are divided by a count of their target: right, or named, for any first step.

The first target counts the same number of entries in each microbatch. All of these losses used to be averaged by rows
without a warning, and later steps with other counts were wrong.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import FxsplitWarning, InputError
from fxsplit.frontend.meanings.losses import find_loss_counts
from tests.support.models import FAST

ROWS, TOKENS, CLASSES, PAD = 8, 5, 3, 7
Loss = Callable[[Tensor, Any], Tensor]

torch.manual_seed(1)
FULL = torch.ones(ROWS, TOKENS)
PART = (torch.rand(ROWS, TOKENS) > 0.4).float()
PART[0] = 0  # the first microbatch counts few entries
LABELS = torch.randint(0, CLASSES, (ROWS, TOKENS))
NUMBERS = torch.randn(ROWS, TOKENS).double()
IGNORED, PADDED = (torch.where(PART == 0, value, LABELS) for value in (-100, PAD))
MISSING = torch.where(PART == 0, torch.nan, NUMBERS)
LENGTHS = torch.tensor([1, 5, 2, 3, 0, 0, 0, 4])
WEIGHTS = torch.tensor([1.0, 1.0, 0.0]).double()


class Tokens(nn.Module):
    """A number for each class of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.b(torch.tanh(self.a(x)))
        return scores


def lose(o: Tensor, t: Tensor) -> Tensor:
    """The loss of each token."""
    losses: Tensor = F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="none")
    return losses.view_as(t)


def square(o: Tensor, t: Tensor) -> Tensor:
    """The squared error of each token."""
    squares: Tensor = (o[..., 0] - t).square()
    return squares


def average(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean of the losses under a mask, in the usual form."""
    mean: Tensor = (losses * mask).sum() / mask.sum()
    return mean


def guard(o: Tensor, t: Tensor) -> Tensor:
    """Zero if nothing counts."""
    mask = t != -100
    return average(lose(o, t), mask) if mask.any() else o.sum() * 0


def divide(o: Tensor, t: Tensor, by: Callable[[Tensor], Any]) -> Tensor:
    """The sum of the losses, divided by a function of the number of labels that count."""
    total: Tensor = F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum")
    loss: Tensor = total / by((t != -100).sum())
    return loss


def fill(o: Tensor, t: Tensor) -> Tensor:
    """A mask that is filled in place."""
    mask = torch.zeros_like(t)
    mask[t != -100] = 1
    return (lose(o, t) * mask).sum() / mask.sum().clamp_(min=1)


def shift(o: Tensor, t: Tensor) -> Tensor:
    """The loss of predicting the next token from each token."""
    return average(lose(o[:, :-1], t[:, 1:].contiguous()), t[:, 1:] != -100)


LABELLED: dict[str, Loss] = {
    "a mask": lambda o, t: average(lose(o, t), t != -100),
    "a mask in the loss's dtype": lambda o, t: average(lose(o, t), (t != -100).to(o.dtype)),
    "chosen entries": lambda o, t: lose(o, t)[t != -100].mean(),
    "chosen outputs and labels": lambda o, t: F.cross_entropy(o[t != -100], t[t != -100]),
    "clamped": partial(divide, by=lambda count: count.clamp(min=1)),
    "a small number added": partial(divide, by=lambda count: count + 1e-3),
    "the larger of two": partial(divide, by=lambda count: max(count, 1)),
    "times one by it": lambda o, t: lose(o, t).sum() * (1 / (t != -100).sum()),
    "a mean by a mean": lambda o, t: lose(o, t).mean() / (t != -100).double().mean(),
    "a mask that adds up to one": lambda o, t: (lose(o, t) * ((t != -100) / (t != -100).double().sum())).sum(),
    "guarded": guard,
    "filled in place": fill,
    "shifted": shift,
    "places": lambda o, t: lose(o, t)[(t != -100).nonzero(as_tuple=True)].mean(),
    "two means over one mask": lambda o, t: average(lose(o, t), t >= 0) + average(o.square().sum(-1), t >= 0),
}
# The loss, a first target with equal counts in all microbatches, and a later one.
RIGHT: dict[str, tuple[Loss, Any, Any]] = {
    **{name: (loss, LABELS, IGNORED) for name, loss in LABELLED.items()},
    "a mask of floats": (lambda o, t: average(lose(o, t[0]), t[1]), (LABELS, FULL), (LABELS, PART)),
    "a mask in a dict": (
        lambda o, t: average(lose(o, t["y"]), t["mask"]),
        {"y": LABELS, "mask": FULL.bool()},
        {"y": LABELS, "mask": PART.bool()},
    ),
    "weights": (lambda o, t: average(lose(o, t[0]), t[1]), (LABELS, FULL / 2), (LABELS, PART + 0.3)),
    "lengths": (
        lambda o, t: square(o, t[0])[torch.arange(TOKENS) < t[1][:, None]].mean(),
        (NUMBERS, torch.full((ROWS,), TOKENS)),
        (NUMBERS, LENGTHS),
    ),
    "numbers that are missing": (
        lambda o, t: F.mse_loss(o[..., 0][~t.isnan()], t[~t.isnan()]),
        NUMBERS,
        MISSING,
    ),
    "padding": (lambda o, t: average(lose(o, t.clamp(max=2)), t != PAD), LABELS, PADDED),
    "ignored padding": (
        lambda o, t: F.cross_entropy(o.transpose(1, 2), t, ignore_index=PAD, reduction="sum") / (t != PAD).sum(),
        LABELS,
        PADDED,
    ),
    "weights of classes": (lambda o, t: average(lose(o, t), WEIGHTS[t]), LABELS.clamp(max=1), LABELS),
}
NAMED: dict[str, tuple[Loss, Any, Any]] = {
    "a number of Python": (partial(divide, by=lambda count: max(float(count), 1.0)), LABELS, IGNORED),
    "an array": (lambda o, t: lose(o, t)[torch.from_numpy(t.numpy() != -100)].mean(), LABELS, IGNORED),
    "another term": (lambda o, t: average(lose(o, t), t != -100) + o.square().mean(), LABELS, IGNORED),
    "numbers that are left out": (lambda o, t: square(o, t).nanmean(), NUMBERS, MISSING),
    "a mask of outputs": (lambda o, t: square(o, t)[o[..., 0].abs() < 3].mean(), NUMBERS, NUMBERS * 9),
}
# Means and sums in which all rows weigh alike for any target.
PLAIN: dict[str, tuple[Loss, Any, Any]] = {
    "a sum under a mask": (lambda o, t: (square(o, t[0]) * t[1]).sum(), (NUMBERS, FULL), (NUMBERS, PART)),
    "a mean of a masked loss": (lambda o, t: (square(o, t[0]) * t[1]).mean(), (NUMBERS, FULL), (NUMBERS, PART)),
    "by all entries": (lambda o, t: (square(o, t[0]) * t[1]).sum() / t[1].numel(), (NUMBERS, FULL), (NUMBERS, PART)),
    "by row": (
        lambda o, t: (square(o, t[0]).sum(1) / t[1].clamp(min=1)).mean(),
        (NUMBERS, torch.full((ROWS,), TOKENS)),
        (NUMBERS, LENGTHS),
    ),
    "with another term": (lambda o, t: F.cross_entropy(o.transpose(1, 2), t) + o.square().mean(), LABELS, LABELS % 2),
    "of probabilities": (lambda o, t: F.binary_cross_entropy(o[..., 0].sigmoid(), t.double()), FULL, PART),
    "one of all classes": (
        lambda o, t: -(F.one_hot(t, CLASSES) * o.log_softmax(-1)).sum(-1).mean(),
        LABELS,
        LABELS.flip(0),
    ),
    "by an output's size": (lambda o, t: (0.5 - (-lose(o, t)).exp()).square().mean(), LABELS, LABELS % 2),
}


def step(loss_fn: Loss, *targets: Any) -> tuple[float, list[str]]:
    """Return the largest difference of steps on these targets from the unsplit model, and the warnings."""
    torch.manual_seed(0)
    model, x, worst = Tokens().double(), torch.randn(ROWS, TOKENS, 8).double(), 0.0
    unsplit = copy.deepcopy(model)
    with (
        fxsplit.compile(model, 2, loss_fn=loss_fn, n_microbatches=3, passes=FAST) as pipe,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for target in targets:
            expected = loss_fn(unsplit(x), target)
            expected.backward()
            worst = max(worst, abs(float(pipe.step(x, target=target) - expected)))
            for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
                assert a.grad is not None and b.grad is not None
                worst = max(worst, float((a.grad - b.grad).abs().max()))
    return worst, [str(w.message) for w in said if issubclass(w.category, FxsplitWarning)]


@pytest.mark.parametrize("name", [*RIGHT, *PLAIN])
def test_a_mean_written_by_hand_is_that_of_the_whole_batch_in_later_steps_too(name: str) -> None:
    worst, said = step(*(RIGHT | PLAIN)[name])
    assert worst < 1e-12 and said == []


@pytest.mark.parametrize("name", NAMED)
def test_a_mean_whose_count_is_not_found_is_said_in_the_first_step(name: str) -> None:
    loss_fn, first, later = NAMED[name]
    for targets in ([first], [first, later]):
        (said,) = step(loss_fn, *targets)[1]
        assert "loss_fn is no mean over rows and no sum" in said


def test_nothing_counts_in_a_microbatch() -> None:
    """If no entry of a microbatch counts, a loss of zero adds nothing to the batch's; any other value is refused."""
    nothing = LABELS.clone()
    nothing[:3] = -100
    for name in ("a mask", "guarded", "clamped"):
        worst, said = step(LABELLED[name], LABELS, nothing)
        assert worst < 1e-12 and said == []

    def fall_back(o: Tensor, t: Tensor) -> Tensor:
        mask = t != -100
        return average(lose(o, t), mask) if mask.any() else o.square().mean()

    with pytest.raises(
        InputError, match=r"the loss of microbatch 0 is 0\.\d+.*a count that is zero in this microbatch"
    ):
        step(fall_back, LABELS, nothing)


def test_what_a_target_is_compared_with_is_a_mark() -> None:
    outputs, target = torch.randn(4, CLASSES), torch.tensor([0, 1, 2, 1])

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        mask = (t != 9) & (t < 5) & ~torch.isin(t, torch.tensor([40, 50]))
        return average(lose(o[:, None], t[:, None])[:, 0], mask & (o[:, 0] > 77) & (WEIGHTS[t] > 0))

    counts, marks = find_loss_counts(loss_fn, outputs, (target,))
    assert [*counts] == [] and {9, 5, 4, 6, 40, 50, 2} <= set(marks) and 77 not in marks
    counts, _ = find_loss_counts(lambda o, t: average(lose(o, t), t != 9), outputs[:, None], (target[:, None],))
    assert [count.by_rows for count in counts] == [False, True]
    assert counts[0].find_count([torch.tensor([[9], [9], [1]])]) == 1
    assert counts[0].weigh([[target[:1]], [target[1:]]], [1, 3], [target]) == [0.25, 0.75]
