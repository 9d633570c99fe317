"""Graphs that torch.export makes: their branches, threads, batch norm, and models in several places."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

import fxsplit
from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.front_ends.export.exporter import TorchExport
from fxsplit.ir.facts.capture.scope import Scope
from tests.frontend.subjects import make_subject
from tests.frontend.test_frontend import Branches
from tests.support.models import FAST, Two

OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Parity(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 10 if x.shape[0] % 2 == 0 else self.a(x)
        out: Tensor = self.b(h)
        return out


class Several(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h - h.mean(1, keepdim=True) if x.shape[0] > 1 else h)
        return out


def test_an_exported_graph_refuses_rows_of_another_branch() -> None:
    """Once a graph of one branch ran for rows for which the model takes the other."""
    for model, count, message in (
        (Parity(), 6, r"a microbatch has 3 rows, and .* another branch .*% 2 == 0"),
        (Several(), 2, r"a microbatch has 1 rows, and .* for 2 to any number of rows"),
    ):
        with (
            fxsplit.compile(model, 2, example_inputs=rows(), **OPTIONS) as pipe,
            pytest.raises(InputError, match=message),
        ):
            pipe(rows(count))


def test_a_batch_norm_called_twice_in_an_exported_graph() -> None:
    """Once the second call of one batch norm was not found in an exported graph."""

    class Again(Two):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            self.narrow(x)
            out: Tensor = self.b(self.norm(self.a(self.norm(x))))
            return out

    with fxsplit.compile(Again(), 2, **OPTIONS) as pipe:
        found = fxsplit.verify(pipe, rows())
        assert found.equal and found.front_end == "export", found.offending


def test_exports_in_several_threads_take_turns() -> None:
    """Once two exports at a time left each other's patches in torch."""

    class Narrow(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.narrow(x)
            out: Tensor = self.b(self.a(x))
            return out

    errors: list[Exception] = []

    def compile_some() -> None:
        try:
            for _ in range(2):
                fxsplit.compile(Narrow(), 2, example_inputs=rows(), **OPTIONS).close()
        except Exception as error:
            errors.append(error)

    compile_some()  # torch loads its compiler with the first export, which changes some functions for good
    before = torch.autograd.Function.__dict__["apply"], torch.autograd.graph.saved_tensors_hooks.__enter__
    threads = [threading.Thread(target=compile_some) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not errors
    assert before == (torch.autograd.Function.__dict__["apply"], torch.autograd.graph.saved_tensors_hooks.__enter__)


def test_a_model_in_several_places_is_exported_from_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is once stages are on GPUs and another mode is compiled; the graph is of the model all the same."""
    from fxsplit.frontend import subject

    @contextmanager
    def copied(module: nn.Module, tensors: list[Tensor], from_shapes: bool) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        yield copy.deepcopy(module), [t.clone() for t in tensors]

    monkeypatch.setattr(subject, "make_runnable", copied)
    model, x = Branches(), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        held = {id(w) for s in pipe.stages.stages for w in (*s.module.parameters(), *s.module.buffers())}
        assert {id(w) for w in (*model.parameters(), *model.buffers())} <= held
        assert pipe.front_end == "export" and fxsplit.verify(pipe, x).equal


def test_conversions_that_change_nothing_are_skipped() -> None:
    """torch.export cannot follow Module.to(), which libraries call in forward() to be sure."""

    class Converts(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.narrow(x)
            self.a.to(x.device, torch.float32).to(dtype=torch.float32)
            out: Tensor = self.b(self.a(x))
            return out

    model, x = Converts(), rows()
    graph = TorchExport().attempt(make_subject(model, x))
    torch.testing.assert_close(graph.gm(x), model(x))
    assert graph.scope.fixed and graph.scope.bounds == (2, None) and graph.scope.front_end == "export"


def test_bounds_are_those_of_the_branch_that_was_taken() -> None:
    class Between(Two):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) if 3 < x.shape[0] < 9 else x
            out: Tensor = self.b(h)
            return out

    assert TorchExport().attempt(make_subject(Between(), rows(6))).scope.bounds == (4, 8)


def test_a_failure_names_line_and_submodule() -> None:
    class Decides(Two):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 1e6 else -x

    with pytest.raises(
        TraceError, match=r"cannot follow Sequential in submodule '1' at .*test_exporter\.py:\d+"
    ) as caught:
        TorchExport().attempt(make_subject(nn.Sequential(nn.Linear(4, 4), Decides()), rows()))
    assert caught.value.submodule == "1"


class Contrasts(nn.Module):
    """Compares each row with all the rest, as CLIP does: the number of rows is a constant of an exported graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.normalize(self.b(torch.tanh(self.a(x))))
        return nn.functional.cross_entropy(h @ h.T, torch.tensor(list(range(len(x)))))


def test_rows_that_are_a_constant_of_whole_batches() -> None:
    """Such a model used to be refused, even with one microbatch a batch, which only needs one number of rows."""
    torch.manual_seed(0)
    model = Contrasts().double()
    with fxsplit.compile(model, 2, n_microbatches=1, passes=FAST) as pipe:
        for count in (6, 5, 6, 2, 1):
            x = torch.randn(count, 4, dtype=torch.float64)
            found, wanted = pipe(x), model(x)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
            pairs = zip(*(torch.autograd.grad(y, [*model.parameters()]) for y in (found, wanted)), strict=True)
            for got, expected in pairs:
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        assert pipe.traced[Scope].rows_fixed
    # With several microbatches the loss differs, and the error is that for any such model.
    with (
        fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe,
        pytest.raises(InputError, match="its rows depend on each other"),
    ):
        pipe(torch.randn(6, 4).double())


class Documents(nn.Module):
    """Makes its mask from a function, under vmap, which leaves an operator of higher order without a body."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, doc: Tensor) -> Tensor:
        x, length = self.a(ids), ids.shape[1]
        mask = create_mask(lambda b, h, q, k: doc[0, q] == doc[0, k], 1, 1, length, length, device="cpu")
        made: Tensor = self.b(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask[0]))
        return made


@pytest.mark.parametrize("n", [1, 2])
def test_a_mask_that_is_made_of_a_function(n: int) -> None:
    """The operator was taken for a block, and the search for its body ended with a bare StopIteration."""
    torch.manual_seed(0)
    model, call = Documents().double(), (torch.randint(20, (4, 6)), torch.tensor([[0, 0, 1, 1, 1, 2]]))
    chunks: Any = {"ids": 0, "doc": fxsplit.Replicate}
    with fxsplit.compile(model, 2, example_inputs=call, n_microbatches=n, chunks=chunks, passes=FAST) as pipe:
        compare_gradients(pipe, model, call)


class Maps(nn.Module):
    """Runs a function under vmap between its layers."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.weights = nn.Parameter(torch.randn(3, 4, 4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.run(self, self.a(x)))
        return out


def map_twice(model: Any, h: Tensor) -> Tensor:
    inner: Tensor = torch.vmap(lambda row: torch.vmap(lambda e: e.sin() + e)(row) * row.sum())(h)
    found: Tensor = torch.vmap(model.inner)(inner)
    return found


def map_without_gradients(model: Any, h: Tensor) -> Tensor:
    def scale(row: Tensor) -> Tensor:
        with torch.no_grad():
            factor = row.square().sum()
        return row * factor

    found: Tensor = torch.vmap(scale)(h)
    return found


@pytest.mark.parametrize(
    "run",
    [
        lambda m, h: torch.vmap(lambda row: row.softmax(0) * row.sum())(h),
        lambda m, h: torch.vmap(lambda w, v: v @ w, in_dims=(0, None))(m.weights, h).mean(0),
        lambda m, h: sum(torch.vmap(lambda row, c: (row * c, m.inner(row)), in_dims=(0, None))(h, torch.ones(4).to(h))),
        map_twice,
        map_without_gradients,
    ],
)
def test_what_vmap_runs_is_one_module(run: Any) -> None:
    """The begin and end of a vmap have unused values, and used to be left out: the nodes between did not run."""
    torch.manual_seed(0)
    model, x = Maps(run).double(), torch.randn(8, 4).double()
    with fxsplit.compile(model, 2, n_microbatches=3, passes=FAST) as pipe:
        for rows in (8, 7):
            compare_gradients(pipe, model, (x[:rows],))


def compare_gradients(pipe: fxsplit.Pipeline, model: nn.Module, call: tuple[Tensor, ...]) -> None:
    """Compare outputs and all gradients of a pipeline and its model."""
    found, wanted = pipe(*call), model(*call)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    weights = [*model.parameters()]
    grads = (torch.autograd.grad(y.square().sum(), weights, allow_unused=True) for y in (found, wanted))
    for got, expected in zip(*grads, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


class Constant(nn.Module):
    """Makes the number of rows of one argument a constant."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other.view(int(other.shape[0]), -1)


def test_a_size_that_is_made_a_constant_names_its_argument() -> None:
    """torch.export numbers the arguments, under names that the user has never seen."""
    subject = make_subject(Constant(), rows(), rows())
    with pytest.raises(TraceError, match=r"dimension 0 of argument '(x|other)'") as caught:
        TorchExport().attempt(subject)
    assert "L['in_" not in str(caught.value)
