"""Models with unusual and legitimate features that once went wrong."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit.errors import InputError, TraceError
from tests.support.models import FAST

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
    """Decides by values, as some of torch's own operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.cond(self.a(x).mean() > 0, lambda y: y.clone(), lambda y: -y, (x,)))
        return out


@pytest.mark.parametrize("default_device", [None, pytest.param("cpu", marks=pytest.mark.long)])
def test_a_branch_that_values_decide_is_never_a_constant(default_device: str | None) -> None:
    with torch.device(default_device) if default_device else nullcontext():
        check_branch()


def check_branch() -> None:
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
    """The same in reverse order."""

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
    assert proven(sequential(PerSample()), x) == "export"
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


def test_scripted_modules_are_refused() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning)):  # the kind depends on torch's version
        scripted: Any = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TraceError, match=r"submodule '1' of Sequential is from torch\.jit.*scripted or traced from"):
        fxsplit.compile(sequential(scripted), 2, example_inputs=torch.randn(8, 4), **OPTIONS)


def test_reentrant_checkpoints_are_refused() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(checkpoint(self.a, self.b(x), use_reentrant=True))
            return out

    with pytest.raises(TraceError, match=r"checkpoint\(use_reentrant=True\).*compile\(recompute='always'\)"):
        fxsplit.compile(Kept(), 2, example_inputs=torch.randn(8, 4), **OPTIONS)


class Spreads(nn.Module):
    """Multiplies by a sparse matrix that it keeps, or makes from a weight."""

    adjacency: Tensor

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 6))
        self.register_buffer("adjacency", (torch.rand(6, 6) > 0.4).to(torch.float32).to_sparse() if kept else None)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.weight.to_sparse() if self.adjacency is None else self.adjacency
        out: Tensor = torch.sparse.mm(matrix, x.T).T
        return out


class Graphs(nn.Module):
    """A graph convolution that takes its adjacency matrix as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        out: Tensor = torch.sparse.mm(matrix, self.b(torch.relu(torch.sparse.mm(matrix, self.a(x)))))
        return out


def test_sparse_tensors_inside_of_a_submodule_and_whole_as_an_argument() -> None:
    """Each of them failed with an error of torch's, about an operator that sparse tensors lack."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Spreads(kept=True), nn.Tanh(), Spreads(kept=False), nn.Linear(6, 3)).double()
    assert proven(model, torch.randn(8, 4).double()) == "symbolic_trace, with submodules kept whole"
    with pytest.raises(TraceError, match=r"node 'adjacency' .* is a torch.sparse_coo tensor.*in one submodule"):
        fxsplit.compile(Spreads(kept=True), 2, example_inputs=torch.randn(8, 6), **OPTIONS)
    x, matrix = torch.randn(8, 4), (torch.rand(8, 8) > 0.5).float().to_sparse()
    graphs = Graphs()
    whole: Any = {"chunks": {"matrix": fxsplit.Replicate}, "passes": FAST, "n_microbatches": 1}
    with fxsplit.compile(graphs, 2, example_inputs=(x, matrix), **whole) as pipe:
        torch.testing.assert_close(pipe(x, matrix), graphs(x, matrix))
        assert fxsplit.verify(pipe, (x, matrix)).equal
    with pytest.raises(InputError, match=r"argument 'matrix' is sparse_coo.*Replicate"):
        fxsplit.compile(graphs, 2, example_inputs=(x, matrix), **OPTIONS)
