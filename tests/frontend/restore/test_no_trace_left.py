"""Capturing a model leaves the model as it was."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.restore.no_trace_left import refuse_assignments, restore_model
from tests.support.models import FAST, Two


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8)


class Assigns(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        result: Tensor = self.b(self.a(x)) * self.count
        return result


class CachesShape(Assigns):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        self.calls += 1
        result: Tensor = self.b(self.a(x))
        return result


def test_an_assigned_buffer_is_refused_and_the_model_left_as_it_was() -> None:
    """It would be wrong if tracing left its proxy in the model in place of the buffer."""
    model = Assigns()
    with pytest.raises(TraceError, match=r"assigns to 'count'.*self.count.add_"):
        fxsplit.compile(model, 2, example_inputs=vectors())
    assert (
        isinstance(model.count, Tensor) and model.count.item() == 0 and isinstance(model.state_dict()["count"], Tensor)
    )
    model(vectors())


def test_attributes_that_forward_sets_are_restored() -> None:
    """It would be wrong if compiling counted as a call and left traced values in the model."""
    model = CachesShape()
    with (
        pytest.warns(fxsplit.FxsplitWarning, match=r"changes attribute 'last' .*'calls' of the model \(from 0 to 1"),
        fxsplit.compile(model, 2, example_inputs=vectors(), passes=FAST),
    ):
        assert model.calls == 0 and not hasattr(model, "last")


class RegistersItsOwn(nn.Module):
    """Puts hooks on its submodules in the first call, as libraries do to collect activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.inner.register_forward_hook(lambda module, args, output: None)
            self.ready = True
        out: Tensor = self.head(self.inner(x))
        return out


def test_hooks_that_compiling_made_the_model_register_are_gone() -> None:
    """Once hooks that forward() registers while it is captured stayed on the model."""
    model, x = RegistersItsOwn(), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        assert not model.inner._forward_hooks and not model.ready and "forward" not in vars(model)
        found = pipe(x)
        torch.testing.assert_close(found, model(x))
        # Called by itself the model has hooks for good, and one that nothing would call is refused.
        with pytest.raises(InputError, match="submodule 'inner' has hooks"):
            pipe(x)


OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


def test_compiling_leaves_no_trace_on_nested_collections() -> None:
    """Once only lists and dicts directly in the model were restored."""

    class Remembers(Two):
        def __init__(self) -> None:
            super().__init__()
            self.queue: collections.deque[int] = collections.deque()
            self.counter: collections.Counter[str] = collections.Counter()
            self.nested: dict[str, list[Any]] = {"seen": []}

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.queue.append(1)
            self.counter["x"] += 1
            self.nested["seen"].append(h)
            out: Tensor = self.b(h)
            return out

    model = Remembers()
    with pytest.warns(fxsplit.FxsplitWarning, match=r"changes attribute 'queue' of the model \(from 0 items to 1\)"):
        fxsplit.compile(model, 2, example_inputs=rows(), **OPTIONS).close()
    assert not model.queue and not model.counter and model.nested == {"seen": []}


class Kinds(tuple[Any, ...]):
    """Has no length to ask for, as that would be one of two numbers."""

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_model_may_hold_a_tuple_that_refuses_to_be_asked() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds, self.nested = Kinds(("a", [2])), {"x": [Kinds((1,))]}
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(torch.tanh(self.a(x))) * next(iter(self.nested["x"][0]))
            return out if self.kinds else x

    model = Holds()
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=torch.ones(4, 4), n_microbatches=2, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(torch.ones(4, 4)), model(torch.ones(4, 4)))


def test_tensors_hooks_and_collections_are_put_back() -> None:
    model: Any = nn.Linear(2, 2)
    model.held, model.own = [1, {"a": 1}], torch.zeros(2)
    held, state = model.held, torch.get_rng_state()
    with restore_model(model):
        model.register_forward_hook(lambda module, args, output: None)
        model.held[1]["a"] = 2
        model.held.append(3)
        model.own.add_(1)
        model.more = 1
        torch.rand(1)
    assert not model._forward_hooks and not hasattr(model, "more") and torch.equal(state, torch.get_rng_state())
    assert model.held is held and held == [1, {"a": 1}] and not model.own.any()


def test_the_model_is_put_back_when_the_block_fails() -> None:
    model: Any = nn.Linear(2, 2)
    weight = model.weight
    with pytest.raises(KeyError), restore_model(model), refuse_assignments(model):
        model.weight = nn.Parameter(torch.zeros(2, 2))
        model.more = 1
        raise KeyError
    assert model.weight is weight and not hasattr(model, "more")


def test_assignments_are_refused_by_name_and_writes_are_not() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    with refuse_assignments(model), torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(TraceError, match=r"assigns to '0\.weight'"), refuse_assignments(model):
        model[0].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(TraceError, match=r"assigns to 'added'.*call \w+ once, then compile"), refuse_assignments(model):
        model.register_buffer("added", torch.zeros(1))
    assert "added" not in model._buffers
