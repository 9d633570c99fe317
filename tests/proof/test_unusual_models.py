"""Models with unusual and legitimate features, each of which once went wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit.api.compare import measure_difference
from fxsplit.errors import InputError, TraceError
from tests.models import FAST

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def proven(model: nn.Module, *args: Any) -> str:
    """Verify a pipeline and return its front end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fxsplit.compile(model, 2, example_inputs=args, **OPTIONS) as pipe:
            found = fxsplit.verify(pipe, args)
            assert found.equal, found.offending
            return pipe.front_end


class Decides(nn.Module):
    """Decides by values, as an operator of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.cond(self.a(x).mean() > 0, lambda y: y.clone(), lambda y: -y, (x,)))
        return out


def test_a_branch_that_values_decide_is_never_a_constant() -> None:
    with pytest.raises(TraceError, match="cond, which decides by values"):
        fxsplit.compile(Decides(), 2, example_inputs=torch.randn(8, 4), **OPTIONS)
    model = nn.Sequential(nn.Linear(4, 4), Decides(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with pytest.warns(UserWarning, match="'1' of Sequential stays whole"):
        pipe = fxsplit.compile(model, 2, example_inputs=x, **OPTIONS)
    with pipe:
        for sign in (1, -1):
            torch.testing.assert_close(pipe(sign * x), torch.cat([model(part) for part in (sign * x).chunk(2)]))


class Siamese(nn.Module):
    """Calls an encoder with batch norm again without gradients, as SimSiam's targets are made."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        y, z = self.p(self.e(a)), self.p(self.e(b))
        with torch.no_grad():
            of_a, of_b = self.e(a), self.e(b)
        out: Tensor = ((y - of_b) ** 2).mean(1) + ((z - of_a) ** 2).mean(1)
        return out


class TeacherFirst(nn.Module):
    """The same in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.p = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.e(x)
        out: Tensor = self.p(self.e(x)) + target
        return out


class PerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.vmap(lambda row: self.k(row).sin())(x)
        return out


class Differentiates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(torch.func.grad(lambda row: self.k(row.sin()).sum()))(x)
        return out


class Caches(nn.Module):
    """Makes a table on its first call, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.cache is None or length > self.cache.shape[0]:
            self.cache = torch.arange(length, device=x.device).to(x.dtype)
        out: Tensor = self.linear(x) * self.cache[:length]
        return out


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.linear(x), "heads": 3, "rate": 0.5}


def sequential(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))


def test_models_that_people_have() -> None:
    x = torch.randn(8, 4)
    assert proven(Siamese(), x, torch.randn(8, 4)) == "export"
    assert proven(TeacherFirst(), x) == "export"
    assert "whole" in proven(sequential(PerSample()), x)
    assert "whole" in proven(sequential(Differentiates()), x)
    proven(sequential(Caches()), x)
    proven(
        nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(18, 2)), torch.randint(0, 20, (8, 3))
    )
    proven(nn.Sequential(nn.Linear(4, 4), Counts()), x)
    model = nn.Sequential(nn.Linear(4, 4), Counts())
    with fxsplit.compile(model, 2, example_inputs=x, **OPTIONS) as pipe:
        found = pipe(x)
        assert (found["heads"], found["rate"]) == (3, 0.5)


def test_a_number_for_each_row_is_no_constant() -> None:
    class Rows(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            if x.shape[0] > 100:
                return x, 1
            return super().forward(x), int(x.shape[0])

    with pytest.raises(fxsplit.FxsplitError):
        fxsplit.compile(Rows(4, 4), 2, example_inputs=torch.randn(8, 4), **OPTIONS)


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
            assert fxsplit.verify(pipe, x).equal
        finally:
            Fourier.forward = own  # type: ignore[method-assign]
    assert {kind for kind in seen if isinstance(kind, torch.dtype)} == {torch.complex128}
    with fxsplit.compile(Subtracts(), 2, example_inputs=torch.randn(8, 4), **OPTIONS) as pipe:
        assert fxsplit.verify(pipe, torch.randn(8, 4)).equal


def test_differences_of_complex_sparse_and_missing_numbers() -> None:
    a = torch.tensor([1 + 1j, 2 + 2j])
    assert measure_difference(a, a.conj().clone()) > 0.5, "in the imaginary part alone"
    b = torch.tensor([1.0, float("nan"), float("inf")])
    assert measure_difference(b, b.clone()) == 0.0
    assert measure_difference(b, torch.tensor([1.0, 2.0, float("inf")])) == float("inf")
    assert measure_difference(b, torch.tensor([2.0, float("nan"), float("inf")])) == 0.5
    sparse = torch.eye(3).to_sparse()
    assert measure_difference(sparse, sparse.clone()) == 0.0 and measure_difference(2 * sparse, sparse) == 1.0


def test_scripted_modules_are_refused() -> None:
    with pytest.warns(DeprecationWarning):
        scripted: Any = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TraceError, match=r"submodule '1' of Sequential is from torch\.jit.*scripted from"):
        fxsplit.compile(sequential(scripted), 2, example_inputs=torch.randn(8, 4), **OPTIONS)


def test_reentrant_checkpoints_are_refused() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(checkpoint(self.a, self.b(x), use_reentrant=True))
            return out

    with pytest.raises(TraceError, match=r"checkpoint\(use_reentrant=True\).*compile\(checkpoint='always'\)"):
        fxsplit.compile(Kept(), 2, example_inputs=torch.randn(8, 4), **OPTIONS)


def test_what_a_factory_raises_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    from fxsplit.cli.main import main

    for name in ("raising", "single_rows", "lazy"):
        assert main(["verify", f"tests.proof.test_unusual_models:{name}", "--n-microbatches", "3", "--json"]) == 2
        assert f"tests.proof.test_unusual_models:{name}" in capsys.readouterr().err


def raising() -> Any:
    raise KeyError("weights")


def single_rows() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (torch.randn(3, 4),)


def lazy() -> Any:
    return nn.Sequential(nn.Linear(4, 4), Failing()), (torch.randn(3, 4),)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.ones(3, 5))


def test_a_file_says_where_its_stages_are(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from fxsplit.cli.main import main

    file = str(tmp_path / "x.csv")
    assert main(["simulate", "--schedule", "GPipe", "--devices", "2", "--to-csv", file]) == 0
    assert main(["simulate", "--csv", file, "--stages-per-device", "3"]) == 2
    assert "--stages-per-device" in capsys.readouterr().err
    assert issubclass(InputError, fxsplit.FxsplitError)
