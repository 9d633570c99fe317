"""Models that a symbolic trace cannot record: they are exported with torch.export instead."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.symbolic import SymbolicTrace
from tests.frontend.subjects import make_subject
from tests.support.models import FAST, Two


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Modes(nn.Module):
    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.a, self.b, self.mode = nn.Linear(8, 8), nn.Linear(8, 8), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            x = self.a(x)
        result: Tensor = self.b(x.float())
        return result


@pytest.mark.parametrize("mode", [torch.no_grad, partial(torch.autocast, "cpu", torch.bfloat16)])
def test_modes_inside_forward_are_kept(mode: Any) -> None:
    """A symbolic trace ignores such blocks: it would train frozen parts of the model, or compute in another dtype."""
    model, x = Modes(mode), vectors().float()
    unsplit = copy.deepcopy(model)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=1, passes=FAST) as pipe:
        assert pipe.front_end == "export"
        assert torch.equal(pipe(x), unsplit(x))
        pipe(x).sum().backward()
    unsplit(x).sum().backward()
    for a, b in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5)  # type: ignore[arg-type]


OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Unautocast(Two):
    def __init__(self, exported: bool) -> None:
        super().__init__()
        self.exported = exported

    def forward(self, x: Tensor) -> Tensor:
        if self.exported:
            self.narrow(x)
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            v = h.float().pow(2).mean(-1, keepdim=True)
        out: Tensor = self.b(h) * v
        return out


@pytest.mark.parametrize("exported", [False, True])
def test_a_block_without_autocast_stays_one(exported: bool) -> None:
    """While tracing it changes nothing; under a caller's autocast it does."""
    model, x = Unautocast(exported), rows()
    with (
        fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe,
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert pipe.front_end == "export"
        found, expected = pipe(x), torch.cat([model(piece) for piece in x.split(4)])
        assert found.dtype == expected.dtype and torch.equal(found, expected)


class Meters(float):
    """A number that does not print as one."""

    def __repr__(self) -> str:
        return f"{float(self)} m"


class Numbers(nn.Module):
    """Computes with a number of another type than Python's."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.a, self.b, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.use(self.a(x)))
        return result


@pytest.mark.parametrize(
    ("use", "front_end"),
    [
        (lambda x: x / np.sqrt(8), "symbolic_trace"),
        (lambda x: x * np.float32(0.1), "symbolic_trace"),
        (lambda x: x.view(np.int64(-1), *np.array([4])), "symbolic_trace"),
        (lambda x: x.clamp(min=np.float64(-0.5), max=Meters(3)), "symbolic_trace"),
        (lambda x: (x * np.complex128(1j)).imag, "symbolic_trace"),
        (lambda x: x.permute([*np.argsort([0, 1])])[:, : np.int64(4)], "symbolic_trace"),
        (lambda x: x.clone().mul_(np.float64(0.5)), "symbolic_trace"),
        (lambda x: x * torch.from_numpy(np.ones(4)) * np.pi, "symbolic_trace"),
        (lambda x: np.float64(2) * x, "export"),
        (lambda x: x[:, np.array([1, 0, 3, 2])], "export"),
    ],
)
def test_numbers_of_other_types_become_pythons_own(use: Any, front_end: str) -> None:
    """Generated code held `np.float64(2.0)`: the model compiled, and each of its batches failed."""
    model, x = Numbers(use).double(), rows().double()
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        assert pipe.front_end == front_end
        torch.testing.assert_close(pipe(x), model(x), rtol=0, atol=1e-12)


# By name, since the error shows the line that failed.
def branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def loop(x: Tensor) -> Any:
    return sum(x)


def measure(x: Tensor) -> Tensor:
    return x * len(x)


def assign(x: Tensor) -> Tensor:
    x[0] = 1
    return x


def convert(x: Tensor) -> Tensor:
    return x * int(x.sum())


@pytest.mark.parametrize("torchs_words", [True, False])
@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (branch, "select with torch.where"),
        (loop, "Loop over a number that the module knows"),
        (measure, r"Use x.shape\[0\] in place of len\(x\)"),
        (assign, "use torch.where, masked_fill or index_fill"),
        (convert, "Write the part in plain tensor operations"),
    ],
)
def test_advice_follows_from_what_was_asked_of_a_tensor(
    use: Any, advice: str, torchs_words: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It followed from torch's words: a loop was taken for control flow, which torch mentions there too."""

    class Reworded(RuntimeError):
        def __init__(self, *_: object) -> None:
            super().__init__("iterated control flow, len, item assignment")

    if not torchs_words:
        monkeypatch.setattr("torch.fx.proxy.TraceError", Reworded)
        monkeypatch.setattr("torch.fx.proxy.RuntimeError", Reworded, raising=False)
    subject = make_subject(Numbers(use), rows())
    with pytest.raises(TraceError, match=advice):
        SymbolicTrace().attempt(subject)


class Policy(nn.Module):
    """Makes a distribution, and returns it or the result of `use` on it."""

    def __init__(self, use: Any, **options: Any) -> None:
        super().__init__()
        self.a, self.b, self.use, self.options = nn.Linear(8, 8), nn.Linear(8, 2), use, options

    def forward(self, x: Tensor) -> Any:
        mean: Tensor = self.b(torch.tanh(self.a(x)))
        return self.use(torch.distributions.Normal(mean, mean.exp() + 1, **self.options))


def test_distributions_are_refused_with_what_to_do() -> None:
    """The advice used to be torch.where, or registering a pytree."""
    for model, text in (
        # Stated, since torch.compile switches it off for the whole process.
        (Policy(lambda d: d, validate_args=True), "validate_args=False, and return tensors"),
        (Policy(lambda d: d, validate_args=False), "Normal.*. Return the tensors in it, and make such an object"),
    ):
        with pytest.raises(TraceError, match=text):
            fxsplit.compile(model, 2, example_inputs=vectors(), **OPTIONS)
    model, x = Policy(lambda d: d.log_prob(torch.ones(2)), validate_args=False), vectors()
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe(x), model(x))


class Samples(nn.Module):
    """Draws from a normal distribution, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mean, self.width = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        made = torch.distributions.Normal(self.mean(h), self.width(h).exp(), validate_args=True)
        # No torch can export this line. That before can be exported since torch 2.15.
        if made.mean.isnan().all():
            raise ValueError("no mean")
        result: Tensor = made.rsample() * 0 + made.mean
        return result


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.seen: Any
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(h.mean(0))
            if self.seen.sum() > 1e9:
                self.seen.zero_()
        return h


def test_what_the_models_own_forward_does_may_move_into_a_submodule() -> None:
    """Inside of a submodule both are equal to the model, and the error did not say so."""
    x = rows().double()
    for model, words in ((Samples(), "validate_args=False"), (Detaches(), "no_grad")):
        with pytest.raises(TraceError, match=rf"{words}.*, or move this part into a submodule, which then stays whole"):
            fxsplit.compile(model.double(), 2, example_inputs=x, **OPTIONS)
        whole = nn.Sequential(nn.Linear(4, 4), model, nn.Linear(4, 4)).double()
        with (
            pytest.warns(fxsplit.FxsplitWarning, match="submodule '1' of Sequential stays whole"),
            fxsplit.compile(whole, 2, example_inputs=x, **OPTIONS) as pipe,
        ):
            assert fxsplit.verify(pipe, x).equal
