"""Models that cannot be captured."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.frontend.capture import run_watched
from fxsplit.frontend.subject import Runnable
from fxsplit.ir.facts.capture.call import Call
from fxsplit.torch_internals.random.generators import read_generators, read_python_generators
from tests.frontend.subjects import make_subject
from tests.support.models import FAST
from tests.support.refusals import refused


def x(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Random(nn.Module):
    """Draws a Python number while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(8, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.a(x) * self.calls
        return result


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x).sum(dim=0)
        return result


def test_models_that_cannot_be_captured() -> None:
    with refused(TraceError, "the graph of Random computes output 0 differently from the model"):
        fxsplit.compile(Random(), 2, example_inputs=x())


def test_a_sum_over_rows_is_added_up() -> None:
    """Once a model that returns other than rows was refused, sums and means too."""
    model, batch = Sums(), x()
    with fxsplit.compile(model, 2, example_inputs=batch, n_microbatches=2) as pipe:
        torch.testing.assert_close(pipe(batch), model(batch))


def test_a_model_that_raises_by_itself_says_on_what() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        fxsplit.compile(model, 2, example_inputs=x(4), n_microbatches=4)
    assert "not on microbatches of 1" in str(caught.value) and "n_microbatches=1" in str(caught.value)


class Tangent(nn.Module):
    """Adds a derivative in forward mode to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y, slope, *_ = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        return torch.as_tensor(y + slope)


def test_derivatives_in_forward_mode_are_named_and_right_in_a_submodule() -> None:
    """The error used to be torch's own, about dimensions and proxies."""
    batch = torch.randn(4, 8)
    with pytest.raises(TraceError, match=r"Tangent takes derivatives by itself.*test_capture\.py.*into a submodule"):
        fxsplit.compile(Tangent(), 2, example_inputs=batch, n_microbatches=2, passes=FAST)
    model = nn.Sequential(nn.Linear(8, 8), Tangent(), nn.Linear(8, 3))
    passes = f"leaf{{path=1}},{FAST}"
    with fxsplit.compile(model, 2, example_inputs=batch, n_microbatches=2, passes=passes) as pipe:
        torch.testing.assert_close(pipe(batch), model(batch))


class ChecksLabels(nn.Module):
    """Refuses labels that are no classes, as Hugging Face's models for CTC do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.b(self.a(x))
        if labels is None:
            return logits
        if labels.max() >= 3:
            raise ValueError("labels are too large")
        return nn.functional.cross_entropy(logits, labels), logits


def test_a_loss_that_looks_at_labels_may_be_computed_in_loss_fn() -> None:
    batch = {"x": x(4), "labels": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(TraceError, match=r"or call ChecksLabels without labels, and compute the loss .* in loss_fn"):
        fxsplit.compile(ChecksLabels(), 2, example_inputs=batch, n_microbatches=2, passes=FAST)


class Does(nn.Module):
    """Returns rows, after a function has done something with the model and its input."""

    factor = 1.0
    act: Callable[[Does, Tensor], Any]
    seen: Tensor
    steps: Iterator[float]

    def __init__(self, act: Callable[[Does, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(4, 3), act
        self.register_buffer("seen", torch.zeros(3))
        self.notes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.act(self, x)
        out: Tensor = self.a(x)
        return out


def fill(model: Does, x: Tensor) -> None:
    if not model.notes:
        model.notes.append(len(x))


def look_at_the_input(model: Does, x: Tensor) -> None:
    if not x.requires_grad:
        model.factor += 1.0


SHOWN_BY_ONE_RUN: dict[str, tuple[Callable[[Does, Tensor], Any], bool]] = {
    "nothing": (lambda model, x: None, True),
    "a write to its input": (lambda model, x: x.mul_(2.0), True),
    "a write to a buffer": (lambda model, x: model.seen.add_(1.0), True),
    "a draw of torch": (lambda model, x: torch.rand_like(x), True),
    "an attribute that each call changes": (lambda model, x: setattr(model, "factor", model.factor + 1.0), False),
    "a cache that only the first call fills": (fill, False),
    "a draw of Python": (lambda model, x: random.random(), False),
    "a draw of numpy": (lambda model, x: numpy.random.rand(), False),
    "a look at the grad mode": (lambda model, x: torch.is_grad_enabled(), False),
    "a look at a weight": (lambda model, x: model.a.weight.requires_grad, False),
    "a look at its input that changes an attribute": (look_at_the_input, False),
    "values that only a tensor without gradients gives": (lambda model, x: x.numpy(), False),
    "a gradient of its own": (lambda model, x: torch.autograd.grad(model.a(x).sum(), model.a.weight), False),
    "another tensor for a buffer": (lambda model, x: setattr(model, "seen", model.seen + 1.0), False),
    "a write to a parameter": (lambda model, x: model.a.weight.data.mul_(0.5), False),
}


@pytest.mark.parametrize("name", SHOWN_BY_ONE_RUN)
def test_one_run_serves_if_it_shows_all_and_leaves_no_trace(name: str) -> None:
    """Anything that a second call, or a call without gradients, may do otherwise needs calls of its own."""
    act, shown = SHOWN_BY_ONE_RUN[name]
    model, x = Does(act), torch.ones(6, 4)
    subject = make_subject(model, x)
    before = {path: t.clone() for path, t in model.state_dict().items()}
    states = read_generators(), read_python_generators()
    assert (run_watched(subject) is not None) == (subject.first.ran is not None) == shown
    assert states == (read_generators(), read_python_generators())
    assert (model.factor, model.notes) == (1.0, []) and torch.equal(x, torch.ones(6, 4))
    assert all(torch.equal(before[path], t) for path, t in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_with_an_iterator_is_called_again() -> None:
    """Nothing but another call shows that the iterator has gone on."""
    model = Does(lambda model, x: next(model.steps))
    model.steps = itertools.cycle([1.0, 1.0, 1.0, 2.0])
    assert run_watched(make_subject(model, torch.ones(6, 4))) is None


def test_a_capture_runs_the_model_once_for_its_check_and_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs on other rows then show how pieces make the outputs. A batch norm normalises them in another way."""
    ran: list[int] = []
    run_call = Runnable.run_call

    def count(self: Runnable, call: Call) -> Any:
        ran.append(len([*call.args, *call.kwargs.values()][0]))
        return run_call(self, call)

    monkeypatch.setattr(Runnable, "run_call", count)
    for model, rows in (
        (nn.Linear(8, 3), [4, 6, 2]),
        (nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)), [4, 6, 4, 2]),
        (nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5)), [4, 6, 4, 2]),
    ):
        ran.clear()
        fxsplit.capture(model, x(), n_microbatches=2)
        assert ran == rows
