"""Capturing a model leaves the model as it was."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError, TraceError
from tests.models import FAST


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
    with fxsplit.compile(model, 2, example_inputs=vectors(), passes=FAST):
        assert model.calls == 0 and not hasattr(model, "last")


class RegistersItsOwn(nn.Module):
    """Puts hooks on its submodules when it is first called, as libraries do to collect what passes."""

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
        with (
            pytest.warns(UserWarning, match="attribute 'ready' of the model changed"),
            pytest.raises(InputError, match="submodule 'inner' has hooks"),
        ):
            pipe(x)


OPTIONS: Any = {"passes": FAST, "n_microbatches": 2}


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 4)


class Two(nn.Module):
    """Two layers; `narrow` sends a model to torch.export, since it decides by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def narrow(self, x: Tensor) -> None:
        if x.shape[-1] != 4:
            raise ValueError("four features")


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
    fxsplit.compile(model, 2, example_inputs=rows(), **OPTIONS).close()
    assert not model.queue and not model.counter and model.nested == {"seen": []}
