"""verify() finds a wrong pipeline, and raises no false alarm."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit import IR
from fxsplit.api.compile import recompile_like
from fxsplit.api.verify.compare import Outcome
from fxsplit.api.verify.tally import Tally
from fxsplit.api.verify.trials import Trial
from fxsplit.errors import CallError, InputError
from fxsplit.passes.profile import profile
from tests.support.models import FAST
from tests.support.own_passes import fold_conv_bn

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 5, dtype=torch.cfloat))
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfft(torch.fft.rfft(self.b(self.a(x))) * self.w, n=8)
        return out


class Subtracts(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x.sub_(x.mean(1, keepdim=True)).mul_(2)))
        return out


def test_verify_looks_at_the_model_that_it_is_given() -> None:
    """Complex parameters stay complex, and a model that writes to its input draws nothing."""
    seen: list[torch.dtype] = []
    model = Fourier()
    x = torch.randn(8, 4, 8)
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        own = Fourier.forward

        def noting(self: Fourier, x: Tensor) -> Tensor:
            seen.append(self.w.dtype)
            return own(self, x)

        Fourier.forward = noting  # type: ignore[method-assign]
        try:
            # This forward() does more than compute, so there is a warning.
            with pytest.warns(fxsplit.FxsplitWarning, match="changes closure variable 'seen'"):
                assert fxsplit.verify(pipe, x).equal
        finally:
            Fourier.forward = own  # type: ignore[method-assign]
    assert {kind for kind in seen if isinstance(kind, torch.dtype)} == {torch.complex128}
    with fxsplit.compile(Subtracts(), 2, example_inputs=torch.randn(8, 4), **OPTIONS) as pipe:
        assert fxsplit.verify(pipe, torch.randn(8, 4)).equal


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


def test_the_plan_of_the_pipeline_is_proven_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy in float64 used to be measured, and could get another plan."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 8))
    measured, plans = [], []
    measure = profile._measure

    def note(*args: Any, **kwargs: Any) -> Any:
        measured.append(args)
        return measure(*args, **kwargs)

    def keep(*args: Any, **options: Any) -> Any:
        made = recompile_like(*args, **options)
        plans.append(made)
        return made

    monkeypatch.setattr(profile, "_measure", note)
    monkeypatch.setattr("fxsplit.api.verify.verify.recompile_like", keep)
    costs = fxsplit.profile(model, rows(4), repeats=1)
    # The last layer takes as long as all others.
    uneven = replace(
        costs,
        nodes=tuple(
            replace(n, forward_ms=1.0 + 4 * (n.name == "_5"), backward_ms=0.0, weight_ms=0.0) for n in costs.nodes
        ),
    )
    measured.clear()
    with fxsplit.compile(model, 2, example_inputs=rows(), costs=uneven, **OPTIONS) as pipe:
        assert [stage.nodes for stage in pipe.plan.stages] == [("_0", "_1", "_2", "_3", "_4"), ("_5",)]
        assert fxsplit.verify(pipe, rows()).equal
        assert not measured and [made.plan.stages for made in plans] == [pipe.plan.stages]
    # A profile of inference has no backwards.
    with fxsplit.compile(model, 2, example_inputs=rows(), inference=True, **OPTIONS) as pipe:
        measured.clear()
        assert fxsplit.verify(pipe, rows()).equal and measured


@pytest.mark.filterwarnings("ignore:submodule .* is one node and takes")
def test_the_proof_has_no_false_alarms() -> None:
    """A hidden state as long as a microbatch; deferred batch norm; a model that is frozen; the caller's generator."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 4, 2, batch_first=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, h = self.rnn(x)
            return self.out(q), h

    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    frozen = copy.deepcopy(norm).requires_grad_(False).eval()
    cases: list[tuple[nn.Module, Tensor, dict[str, Any]]] = [
        (Recurrent(), torch.randn(8, 6, 4), {"n_microbatches": 4}),
        (norm, rows(), {"n_microbatches": 2, "deferred_batch_norm": True}),
        (frozen, rows(), {"n_microbatches": 2}),
    ]
    for model, x, options in cases:
        with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, **options) as pipe:
            state = torch.get_rng_state()
            found = fxsplit.verify(pipe, x)
            assert found.equal, found.offending
            pipe.eval()
            pipe(x)
            assert torch.equal(state, torch.get_rng_state())
    with (
        fxsplit.compile(norm, 2, schedule="PipeDream", **OPTIONS) as pipe,
        pytest.raises(InputError, match="PipeDream does not train as the model itself does"),
    ):
        fxsplit.verify(pipe, rows())


class Scaled(nn.Module):
    """Takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))) * scale
        return out


def test_keyword_arguments_besides_are_given_to_the_model() -> None:
    with fxsplit.compile(Scaled(), 2, **OPTIONS) as pipe:
        assert fxsplit.verify(pipe, rows(), {"scale": torch.rand(8, 1)}).equal
        with pytest.raises(TypeError, match="scale"):
            fxsplit.verify(pipe, rows())


def test_what_rounding_makes_is_measured() -> None:
    """Weights off by rounding show how far rounding moves each gradient. A larger difference is an error."""
    with fxsplit.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 2, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, rows())
    gradients = [d for d in found.differences if d.kind == "gradient"]
    assert len(gradients) == 4 and all(0.0 < d.rounding < 1e-12 for d in gradients)


class Island(nn.Module):
    """Computes a gate in float32 for weights of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.s = nn.Linear(8, 64), nn.Linear(8, 2), nn.Parameter(torch.zeros(64))
        nn.init.zeros_(self.b.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x[:, :8])
        gate = torch.tanh((h.float() * self.s.float()).sum(-1))
        out: Tensor = self.b(x[:, 8:]) + gate.to(h.dtype)[:, None]
        return out


def test_a_part_in_float32_whose_gradients_cancel_is_equal() -> None:
    """The effect of rounding is measured in the dtype of that part."""
    torch.manual_seed(0)
    half = torch.randn(2048, 16)
    x = torch.cat([half, half * torch.tensor([1.0] * 8 + [-1.0] * 8)])
    with fxsplit.compile(Island(), 2, example_inputs=x, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, x)
    assert found.equal, found.offending
    assert found.coarse == torch.finfo(torch.float32).eps


class Part(nn.Module):
    """Computes in one dtype between layers in another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.a, self.b, self.aside = nn.Linear(8, 16), nn.Linear(16, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.b(torch.tanh(h.to(self.dtype)).to(h.dtype)), self.aside(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_part_in_half_precision_is_equal(dtype: torch.dtype) -> None:
    x = torch.randn(32, 8)
    with fxsplit.compile(Part(dtype), 2, example_inputs=x, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, x)
    assert found.equal, found.offending
    assert found.coarse == torch.finfo(dtype).eps


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.0 + 1e-3), (torch.float64, 1.0 + 1e-6)])
def test_a_wrong_factor_is_found_in_any_dtype(
    dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline with an error in one part beyond rounding is found; rounding in it leaves the rest as it is."""
    own = Trial.run_pipeline

    def run_wrongly(self: Trial, split: Any) -> Outcome:
        found = own(self, split)
        wrong = {n: g * factor if n == "a.weight" and g is not None else g for n, g in found.gradients.items()}
        return replace(found, gradients=wrong)

    monkeypatch.setattr(Trial, "run_pipeline", run_wrongly)
    x = torch.randn(32, 8)
    with fxsplit.compile(Part(dtype), 2, example_inputs=x, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, x)
    assert [d.name for d in found.offending] == ["a.weight"]
    aside = [d for d in found.differences if "aside" in d.name]
    assert len(aside) == 2 and all(d.rounding < 1e-12 for d in aside)


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.second(self.first(batch["image"]))
        return out


def test_verify_refuses_what_compile_refuses_in_the_same_words() -> None:
    """Not the TypeError of the unsplit model."""
    batch = {"image": torch.randn(8, 4)}
    with fxsplit.compile(TakesADict(), 2, example_inputs=(batch,), n_microbatches=2, passes=FAST) as pipe:
        for wrong in (batch, (batch, batch), ()):
            with pytest.raises(CallError) as by_compile:
                fxsplit.compile(TakesADict(), 2, example_inputs=wrong)
            with pytest.raises(CallError) as by_verify:
                fxsplit.verify(pipe, wrong)
            assert str(by_verify.value) == str(by_compile.value)
        with pytest.raises(CallError, match=r"so give \(batch,\) if forward\(\) takes the dict itself"):
            fxsplit.verify(pipe, batch)
        with pytest.raises(InputError, match=r"more=tensor.* give a target by name, .*verify\(pipe, x, target=y\)"):
            fxsplit.verify(pipe, torch.randn(8, 4), torch.zeros(8))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="inputs is a int: give a tensor, a tuple"):
            fxsplit.verify(pipe, 3)
        assert fxsplit.verify(pipe, (batch,)).equal
    with pytest.raises(InputError, match="is given a TakesADict: give a pipeline"):
        fxsplit.verify(TakesADict(), batch)  # type: ignore[arg-type]


class Folds:
    """Fold batch norms into convolutions, with `factor` times the right weights."""

    name = "folds"
    tolerance = math.inf

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, ir: IR) -> IR:
        folded = fold_conv_bn(ir)
        with torch.no_grad():
            for name, weight in folded.gm.named_parameters():
                if name.startswith("folded_") and name.endswith(".weight"):
                    weight.mul_(self.factor)
        return folded


@pytest.mark.parametrize("options", [{}, {"inference": True}, {"compress": "int8"}])
def test_a_pipeline_for_evaluation_only_is_compared_in_one_call(options: dict[str, Any]) -> None:
    """It was trained, and step() refused: a pass that makes weights of its own could not be verified at all."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), torch.randn(8, 3, 6, 6)
    model(x)
    model.eval()
    for factor in (1.0, 1.001):
        chain = fxsplit.DEFAULT.before("profile", Folds(factor))
        with fxsplit.compile(model, 2, example_inputs=x, passes=chain, **options) as pipe:
            found = fxsplit.verify(pipe, x)
        assert found.equal == (factor == 1.0)
        assert {d.kind for d in found.differences} == {"output", "buffer"}
        assert [d.name for d in found.offending] == ["0"] * (factor != 1.0) and found.loss == ""
        assert "not trained, as it is only for evaluation, as pass folds has made weights of its own" in str(found)
        assert (found.compression is None) == ("compress" not in options)
        if found.compression is not None:
            assert 0 < found.compression.output < 0.02 and "gradients" not in str(found.compression)


class Sways(nn.Module):
    """Adds to its rows a little that comes from a generator of its own, which no other generator shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out + 1e-7 * torch.randn(out.shape, generator=OWN).to(out.dtype)


OWN = torch.Generator().manual_seed(0)


def test_draws_of_a_models_own_generator_are_refused() -> None:
    model, options = nn.Sequential(nn.Linear(4, 4), Sways()), {**OPTIONS, "passes": f"leaf{{path=1}},{FAST}"}
    refusal = "Sequential draws random numbers besides dropout"
    with fxsplit.compile(model, 2, **options) as pipe, pytest.raises(InputError, match=refusal):
        fxsplit.verify(pipe, rows())


def test_rounding_is_measured_in_a_further_step_only_if_something_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding makes of the second step excuses a difference in it, as that of the first step does."""
    shaken: list[float] = []
    measure = Tally._measure_rounding

    def note(self: Tally, by_shaken: Outcome, coarse: float, by_pieces: Outcome) -> None:
        shaken.append(coarse)
        measure(self, by_shaken, coarse, by_pieces)

    monkeypatch.setattr(Tally, "_measure_rounding", note)
    own = Trial.run_pipeline

    def run_off(self: Trial, split: Any) -> Outcome:
        found = own(self, split)
        return replace(found, outputs={n: None if t is None else t * (1.0 + 1e-8) for n, t in found.outputs.items()})

    with fxsplit.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 2, **OPTIONS) as pipe:
        assert fxsplit.verify(pipe, rows()).equal and len(shaken) == 1
        monkeypatch.setattr(Trial, "run_pipeline", run_off)
        assert {d.kind for d in fxsplit.verify(pipe, rows()).offending} == {"output"} and len(shaken) == 3
