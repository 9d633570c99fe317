"""Gradients that compare rows although no output does: they differ from the whole batch's, and give a warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import FxsplitWarning
from fxsplit.frontend.capture import run_watched
from fxsplit.frontend.meanings import meanings, row_gradients
from fxsplit.frontend.meanings.meanings import find_meanings
from fxsplit.frontend.meanings.row_gradients import find_unjoined_gradient
from fxsplit.frontend.subject import Runnable
from fxsplit.ir.facts.capture.counts import Count
from fxsplit.ir.facts.capture.output_kinds import MEAN, ROWS, OutputKind
from tests.frontend.subjects import make_subject, trace
from tests.support.models import FAST, Mlp, Residual


class Centre(torch.autograd.Function):
    """Hands on gradients without their mean over the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Tensor:
        return grad[0] - grad[0].mean(0, keepdim=True)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(Centre.apply(torch.tanh(self.a(x))))  # type: ignore[no-untyped-call]
        return out


def make_counting() -> nn.Module:
    """Return a model with an embedding that divides gradients by the number of times an entry occurs in the batch."""
    return nn.Sequential(nn.Embedding(5, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(18, 3))


def test_a_gradient_that_compares_rows_is_said() -> None:
    """Outputs are right, so there used to be no warning, although training differed."""
    torch.manual_seed(0)
    for model, x, weight in (
        (make_counting(), torch.randint(5, (8, 3)), "0.weight"),
        (Centred(), torch.randn(8, 4), "a.weight"),
    ):
        with pytest.warns(FxsplitWarning, match=f"the gradient of '{weight}' of .* is not the sum") as said:
            pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST)
        pipe.close()
        assert len(said) == 1 and said[0].filename == __file__


def test_in_one_piece_it_is_the_models() -> None:
    model, x = Centred().double(), torch.randn(8, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, passes=FAST)
    with pipe:
        wanted = torch.autograd.grad(model(x).square().sum(), model.a.weight)
        torch.testing.assert_close(torch.autograd.grad(pipe(x).square().sum(), model.a.weight), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_other_gradients_are_no_reason_to_warn(dtype: torch.dtype) -> None:
    """Rounding is not, nor are dropout, batch norms, or a maximum of numbers that are alike."""
    torch.manual_seed(0)
    alike = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Unflatten(1, (1, 8)), nn.MaxPool1d(4), nn.Flatten())
    for model, x in (
        (Mlp(), torch.randn(8, 8)),
        (Residual(), torch.randn(4, 3, 8, 8)),
        (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(7, 6)),
        (alike, torch.zeros(8, 6)),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            find_meanings(make_subject(model.to(dtype), x.to(dtype), rows=3))


def test_what_is_added_up_is_that_of_the_meaning() -> None:
    """A mean counts once for each row; an output without a gradient or without a meaning does not count."""
    subject = make_subject(nn.Linear(3, 1).double(), torch.randn(6, 3).double(), rows=3)
    with subject.make_runnable(6) as here:
        assert find_unjoined_gradient(here, (3, 1), {"output 0": ROWS}) is None
        # A sum that is taken for a mean would count rows twice.
        assert find_unjoined_gradient(here, (3, 1), {"output 0": MEAN}) == "weight"
        assert find_unjoined_gradient(here, (3, 1), {"output 0": OutputKind("unjoined")}) is None
        here.model.requires_grad_(False)
        assert find_unjoined_gradient(here, (3, 1), {"output 0": MEAN}) is None


def test_gradients_are_added_up_by_parts_if_memory_is_too_small_for_two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def differentiate(outputs: Any, meanings: Any, tensors: Any, rows: int, weights: Sequence[Tensor]) -> list[Tensor]:
        if len(weights) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(outputs, meanings, tensors, rows, weights)

    real = row_gradients._differentiate
    monkeypatch.setattr(row_gradients, "_differentiate", differentiate)
    for model, found in ((Centred(), "a.weight"), (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), None)):
        subject = make_subject(model.double(), torch.randn(6, 4).double(), rows=3)
        with subject.make_runnable(6) as here:
            assert find_unjoined_gradient(here, (3, 1), {"output 0": ROWS}) == found


class Turned(Centred):
    """Returns the rows in a dimension other than the first, so that the guess is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t()


class Summed(Centred):
    """Returns a sum as well as rows; the guess takes the sum for a mean."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return out, out.sum()


@pytest.mark.parametrize(("kind", "runs"), [(Centred, 3), (Turned, 6), (Summed, 6)])
def test_one_run_gives_outputs_and_gradients(kind: type[nn.Module], runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run each for the batch and two pieces; after a wrong guess, gradients need runs of their own."""
    torch.manual_seed(0)
    ran: list[int] = []
    run_model = Runnable.run_model

    def count(self: Runnable, *tensors: Tensor) -> Any:
        if next(self.model.parameters()).dtype is torch.float32:  # the closer look runs in double precision
            ran.append(len(tensors[0]))
        return run_model(self, *tensors)

    monkeypatch.setattr(Runnable, "run_model", count)
    subject = make_subject(kind(), torch.randn(8, 4), rows=4)
    with pytest.warns(FxsplitWarning, match="the gradient of 'a.weight' of .* is not the sum"):
        meanings = find_meanings(subject)
    assert meanings[0] == (OutputKind("rows", 1) if kind is Turned else ROWS)
    # Of a number the whole example says more than a few rows, which have run before.
    assert len(ran) == runs + 3 * (kind is Summed)


class CountingLoss(nn.Module):
    """The loss of a model, divided by the labels that count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y)


@pytest.mark.parametrize("compares", [False, True])
def test_one_run_gives_the_gradients_of_a_loss_that_counts_labels(
    compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.tensor([0, 1, -100, 2, -100, -100, 1, 0])
    model = CountingLoss(Centred() if compares else nn.Linear(4, 3))
    compared: list[Runnable] = []

    def find(here: Runnable, *arguments: Any) -> str | None:
        compared.append(here)
        return find_unjoined_gradient(here, *arguments)

    monkeypatch.setattr(meanings, "find_unjoined_gradient", find)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        (found,) = find_meanings(make_subject(model, x, y, rows=4), trace(model))
    assert found.kind == "mean" and isinstance(found.count, Count)
    assert [str(w.message).split("'")[1] for w in said] == ["model.a.weight"] * compares
    # Only a difference is looked at again, in double precision.
    assert len(compared) == compares


class Shapes(nn.Module):
    """Returns rows of several shapes, a row for each pair of values, and an output that only the input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.frozen = nn.Linear(4, 6), nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        return {"rows": h.unflatten(1, (2, 3)), "flat": h[:, 0], "pairs": h.view(-1, 3), "own": self.frozen(x)}


class Normalised(nn.Module):
    """Returns normalised rows, whose squares add up to the same number for any row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.a(x))
        return out


class Mixed(Normalised):
    """Returns rows that depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean()


class Noisy(Normalised):
    """Draws from a generator of its own, and draws the same in each call."""

    def forward(self, x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(0)
        return super().forward(x) + torch.randn(len(x), 6, generator=own)


TRIED: dict[str, tuple[Any, int, str]] = {  # the model, the runs of the trial, and the warning
    "rows": (Mlp, 2, ""),
    "shapes": (Shapes, 3, ""),
    "normalised": (Normalised, 2, ""),
    "rows that depend on each other": (Mixed, 2, "the rows of output 0 of Mixed depend on each other"),
    "gradients that compare rows": (Centred, 2, "the gradient of 'a.weight' of Centred is not the sum"),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)), 3, ""),
    "draws of its own": (Noisy, 3, ""),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), 3, ""),
    "no weight is trained": (lambda: Mlp().requires_grad_(False), 2, ""),
}


@pytest.mark.parametrize("name", TRIED)
def test_the_first_run_of_the_model_is_that_of_a_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds of outputs and the warnings are those of a trial that runs the piece itself."""
    torch.manual_seed(0)
    make, runs, said = TRIED[name]
    model = make()
    x = torch.randn(8, next(model.parameters()).shape[1])
    ran: list[int] = []
    run_model = Runnable.run_model

    def count(self: Runnable, *tensors: Tensor) -> Any:
        if next(self.model.parameters()).dtype is torch.float32:  # the closer look runs in double precision
            ran.append(len(tensors[0]))
        return run_model(self, *tensors)

    monkeypatch.setattr(Runnable, "run_model", count)
    found = []
    for is_kept in (True, False):
        subject = make_subject(model, x, rows=4)
        assert run_watched(subject) is not None
        if not is_kept:
            subject.first.forget()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found.append((find_meanings(subject), [str(w.message) for w in heard]))
        assert subject.first.ran is None, "its memory is free"
    assert found[0] == found[1]
    assert len(found[0][1]) == bool(said) and all(text.startswith(said) for text in found[0][1])
    assert (ran[:runs], len(ran)) == ([6, 4, 2] if runs == 3 else [6, 2], runs + 3)
