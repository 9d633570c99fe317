"""Python numbers that change from call to call: same results as eager training, without a compile for each value."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from tests.support.models import FAST, take_grads

BETA = 1.0


class Annealed(nn.Module):
    """Reads floats from itself, from a configuration, from a global, and from a module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.leaky = nn.LeakyReLU(0.1)
        self.temperature, self.alpha, self.config = 1.0, 0.0, SimpleNamespace(rate=0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.leaky(self.a(x) / self.temperature)
        h = self.alpha * torch.tanh(self.b(h)) + (1 - self.alpha) * h
        return torch.softmax(self.c(h * self.config.rate) / self.temperature, -1) * BETA


class AnnealedByShape(Annealed):
    """Symbolic tracing cannot follow it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if x.shape[1] > 100 else out


def anneal(model: Annealed, step: int) -> None:
    global BETA
    model.temperature, model.alpha, BETA = 1.0 / (1 + step), 0.2 * step, 1.0 + step
    model.config.rate, model.leaky.negative_slope = 0.5 + 0.1 * step, 0.1 * step


SETTINGS: dict[str, dict[str, Any]] = {
    "1F1B": {},
    "ZB-H1": {"schedule": "ZB-H1"},
    "Chimera": {"schedule": "Chimera"},
    "recompute": {"recompute": "always"},
    "compiled stages": {"stage_backend": "aot_eager"},  # warns that it compiles again, for a number that changes
    "exported": {"kind": AnnealedByShape},
    "exported, recompute": {"kind": AnnealedByShape, "recompute": "always"},
}


@pytest.mark.filterwarnings("ignore:aot_eager has compiled again:fxsplit.errors.RecompileWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n == "compiled stages")) for n in SETTINGS]
)
def test_annealed_numbers_are_those_of_eager_training(name: str, captured: list[nn.Module]) -> None:
    """Each value used to cost a compile and a warning. Warnings are errors here."""
    options = dict(SETTINGS[name])
    model = options.pop("kind", Annealed)().double()
    anneal(model, 0)
    eager = copy.deepcopy(model)
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)
    with fxsplit.compile(
        model, 2, example_inputs=x, loss_fn=F.mse_loss, passes=FAST, n_microbatches=4, **options
    ) as pipe:
        for step in range(5):
            for each in (model, eager):
                anneal(each, step)
            expected = F.mse_loss(eager(x), y)
            expected.backward()
            wanted = take_grads(eager)
            torch.testing.assert_close(pipe.step(x, target=y), expected)
            torch.testing.assert_close(take_grads(model), wanted)
            out = pipe(x)
            torch.testing.assert_close(out, eager(x))
            # Read when the forward runs, as in eager training.
            anneal(model, 9)
            F.mse_loss(out, y).backward()
            anneal(model, step)
            if name != "recompute":  # a recomputed module reads the number again
                torch.testing.assert_close(take_grads(model), wanted)
            model.zero_grad()
            eager.zero_grad()
        assert len(captured) == 2, "at first, and when the numbers have changed for the first time"
        assert fxsplit.verify(pipe, x).equal
        assert pipe(x).requires_grad and "temperature" in pipe.stages[0].inputs


def test_both_modes_follow(captured: list[nn.Module]) -> None:
    model, x = Annealed(), torch.randn(8, 8)
    anneal(model, 0)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        pipe.eval()
        pipe(x)
        for step in range(4):
            anneal(model, step + 1)
            for training in (True, False):
                pipe.train(training)
                torch.testing.assert_close(pipe(x), model(x))
        assert len(captured) == 4, "once more in each mode"
        train, evaluation = pipe.compiler.get_compiled("train"), pipe.compiler.get_compiled("eval")
        assert train is not None and evaluation is not None and train.program is evaluation.program


def test_other_shapes_follow(captured: list[nn.Module]) -> None:
    """The graph for each length is compared with the model at its present numbers."""
    model, x = ByLength(), torch.randn(8, 6, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        for step in range(1, 5):
            model.rate = 1.0 + step
            # The second value is right for the first one's graph; the third takes another branch.
            for length in (6, 6 + step, 20):
                x = torch.randn(8, length, 4)
                torch.testing.assert_close(pipe(x), model(x))
        assert len(captured) == 3


class ByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.rate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.rate
        out: Tensor = self.b(x) if x.shape[1] < 16 else self.b(x) / self.rate
        return out


class Decides(Annealed):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.temperature
        out: Tensor = self.b(h) if self.alpha > 0.5 else self.c(h).repeat(1, 2)
        return out


def test_a_number_that_decides_a_branch_compiles_again(captured: list[nn.Module]) -> None:
    model, x = Decides(), torch.randn(8, 8)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        for step in range(1, 5):
            anneal(model, step)
            with pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because attribute 'alpha'") as said:
                torch.testing.assert_close(pipe(x), model(x))
            assert len(said) == 1
            model.temperature /= 2
            torch.testing.assert_close(pipe(x), model(x))  # without a warning
        assert len(captured) == 5
        # Four of the programs for other values are kept.
        anneal(model, 3)
        torch.testing.assert_close(pipe(x), model(x))
        assert len(captured) == 5


def test_a_rate_of_dropout_is_read_by_the_module(captured: list[nn.Module]) -> None:
    dropout = nn.Dropout(0.25)
    model, x = nn.Sequential(nn.Linear(8, 8), dropout, nn.Linear(8, 8)), torch.ones(64, 8)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        for rate in (0.5, 1.0, 0.75):
            dropout.p = rate
            dropped = float((pipe(x) == model(x) if rate == 1.0 else pipe(x) != model.eval()(x)).double().mean())
            model.train()
            assert dropped > 0.9
        assert len(captured) == 1
        dropout.p = 0.0  # dropout of rate 0 returns its input
        with pytest.warns(fxsplit.FxsplitWarning, match="'1.p' of the model changed from more than 0 to 0.0"):
            torch.testing.assert_close(pipe(x), model(x))


def test_whole_numbers_compile_again() -> None:
    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.count = nn.Linear(4, 4), nn.Linear(4, 4), 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.count):
                x = torch.tanh(self.a(x))
            out: Tensor = self.b(x)
            return out

    model, x = Repeats(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        model.count = 2
        with pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because attribute 'count'"):
            torch.testing.assert_close(pipe(x), model(x))


def test_promotion_is_that_of_python_numbers() -> None:
    """A float64 tensor in place of the number would promote scalar and integer tensors to float64."""

    class Promotes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.rate = nn.Linear(4, 4), nn.Linear(4, 4), 1.0

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            h = self.b(torch.tanh(self.a(x)))
            return h.half() * self.rate, h.mean() * self.rate, h.long() * self.rate

    model, x = Promotes(), torch.randn(8, 4)
    with warnings.catch_warnings(), fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        for rate in (0.5, 1.5, 2.5):
            model.rate = rate
            for found, wanted in zip(pipe(x), model(x), strict=True):
                torch.testing.assert_close(found, wanted)
