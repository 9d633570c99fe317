"""Caches: values that one call makes for later calls are made by the graph too, and cost no second compile."""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.errors import InputError
from tests.support.models import FAST, Two

TABLE: dict[str, Any] = {}


@dataclass
class Rope:
    """A cache that is an object."""

    cos: Tensor
    rate: float


class Caches(Two):
    """Scales its outputs by the result of `scale`, which may keep it."""

    def __init__(self, scale: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.scale = scale
        self.kept: Any = None
        self.table: dict[Any, Any] = {}

    @functools.cached_property
    def number(self) -> float:
        return 2.0

    @functools.cached_property
    def rope(self) -> Rope:
        return Rope(torch.linspace(1, 2, 4).double(), 2.0)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        return {"rate": 2.0, "widths": [1, 2]}

    @functools.lru_cache  # noqa: B019
    def make(self, width: int) -> Tensor:
        return torch.linspace(1, 2, width).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        out: Tensor = self.b(h) * self.scale(self, h)
        return out


def by_hand(model: Any, h: Tensor) -> Any:
    if model.kept is None:
        model.kept = torch.linspace(1, 2, 4).to(h)
    return model.kept


def by_hasattr(model: Any, h: Tensor) -> Any:
    if not hasattr(model, "late"):
        model.late = 2.0
    return model.late


def in_table(model: Any, h: Tensor) -> Any:
    width = h.shape[1]
    if width not in model.table:
        model.table[width] = (torch.linspace(1, 2, 4).double(), [2.0])
    return model.table[width][0] * model.table[width][1][0]


def in_global(model: Any, h: Tensor) -> Any:
    return TABLE.setdefault("rate", 2.0)


def count(model: Any, h: Tensor) -> Any:
    model.calls = model.calls + 1
    return 2.0


Caches.calls = 0  # type: ignore[attr-defined]

CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "cached_property": lambda m, h: m.number,
    "cached_property, an object": lambda m, h: m.rope.cos * m.rope.rate,
    "cached_property, a dict": lambda m, h: m.settings["rate"],
    "lru_cache": lambda m, h: m.make(4),
    "by hand": by_hand,
    "hasattr": by_hasattr,
    "table": in_table,
    "global": in_global,
}


def train(pipe: fxsplit.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compare the gradients of a step with the model's."""
    model.zero_grad()
    loss = pipe.step(x, target=y)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    wanted = F.mse_loss(model(x), y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=1e-10)
    for gradient, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", list(CASES))
def test_a_cache_that_the_model_itself_fills_costs_no_compile(case: str) -> None:
    """A call of the model between two steps filled the cache, and the pipeline compiled again."""
    TABLE.clear()
    torch.manual_seed(0)
    model, x, y = Caches(CASES[case]).double(), torch.randn(8, 4).double(), torch.randn(8, 4).double()
    keys = set(vars(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxsplit.FxsplitWarning)
        with fxsplit.compile(model, 2, passes=FAST, loss_fn=F.mse_loss, n_microbatches=2) as pipe:
            pipe.step(x, target=y)
            assert set(vars(model)) == keys and not TABLE and model.kept is None and not model.table
            program = pipe.compiler.get_compiled("train")
            for _ in range(2):
                train(pipe, model, x, y)
            assert pipe.compiler.get_compiled("train") is program


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "number": ("cached_property", lambda m: setattr(m, "number", 3.0)),
    "attribute of an object": ("cached_property, an object", lambda m: setattr(m.rope, "rate", 3.0)),
    "tensor of an object": ("cached_property, an object", lambda m: m.rope.cos.mul_(2)),
    "entry": ("cached_property, a dict", lambda m: m.settings.update(rate=3.0)),
    "tensor": ("by hand", lambda m: m.kept.mul_(2)),
    "another tensor": ("by hand", lambda m: setattr(m, "kept", torch.ones(4).double())),
    "list in a table": ("table", lambda m: m.table[4][1].__setitem__(0, 3.0)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_another_value_in_a_filled_cache_is_followed(change: str) -> None:
    case, apply = CHANGES[change]
    torch.manual_seed(0)
    model, x, y = Caches(CASES[case]).double(), torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with fxsplit.compile(model, 2, passes=FAST, loss_fn=F.mse_loss, n_microbatches=2) as pipe:
        train(pipe, model, x, y)
        train(pipe, model, x, y)
        apply(model)
        with pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because attribute"):
            train(pipe, model, x, y)


def test_a_counter_costs_no_compile() -> None:
    """Each call of the model changed the counter, which the next value of the counter reads, and nothing else."""
    model, x, y = Caches(count).double(), torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with fxsplit.compile(model, 2, passes=FAST, loss_fn=F.mse_loss, n_microbatches=2) as pipe:
        with pytest.warns(fxsplit.FxsplitWarning, match=r"changes attribute 'calls' of the model \(from nothing to 1"):
            pipe.step(x, target=y)
        program = pipe.compiler.get_compiled("train")
        with warnings.catch_warnings():
            warnings.simplefilter("error", fxsplit.FxsplitWarning)
            train(pipe, model, x, y)
            train(pipe, model, x, y)
        assert pipe.compiler.get_compiled("train") is program


def of_inputs(model: Any, h: Tensor) -> Any:
    if model.kept is None:
        model.kept = h.detach().mean(0)
    return model.kept


def of_weights(model: Any, h: Tensor) -> Any:
    if model.kept is None:
        model.kept = model.a.weight.detach().mean()
    return model.kept


def of_inputs_in_table(model: Any, h: Tensor) -> Any:
    return model.table.setdefault("scale", h.detach().std())


@pytest.mark.parametrize("scale", [of_inputs, of_weights, of_inputs_in_table])
def test_what_the_first_call_makes_of_its_inputs_is_refused_until_it_is_made(scale: Any) -> None:
    """Each microbatch made it again of its own rows, and each step of other weights, without a word."""
    torch.manual_seed(0)
    model, x, y = Caches(scale).double(), torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with fxsplit.compile(model, 2, passes=FAST, loss_fn=F.mse_loss, n_microbatches=2) as pipe:
        with pytest.raises(
            InputError, match=r"keeps in attribute '\w+' of the model .* call Caches once, then compile"
        ):
            pipe.step(x, target=y)
        model(x)
        train(pipe, model, x, y)
        with torch.no_grad():
            model.a.weight.add_(0.1)
        train(pipe, model, x, y)


def in_evaluation(model: Any, h: Tensor) -> Any:
    if model.training:
        model.kept = None
    if model.kept is None and not model.training:
        model.kept = model.a.weight.detach().mean()
    return 1.0 if model.kept is None else model.kept


def test_what_an_evaluation_keeps_of_weights_is_made_again_when_they_have_changed() -> None:
    torch.manual_seed(0)
    model, x = Caches(in_evaluation).double().eval(), torch.randn(8, 4).double()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        for _ in range(2):
            torch.testing.assert_close(pipe(x), model(x), rtol=1e-10, atol=1e-10)
            with torch.no_grad():
                model.a.weight.add_(0.1)
            model.kept = None


def keep_example(model: Any, h: Tensor) -> Any:
    if model.kept is None:
        model.kept = h.detach()
    return 2.0


def test_what_changes_no_output_is_not_refused() -> None:
    model, x = Caches(keep_example).double(), torch.randn(8, 4).double()
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        torch.testing.assert_close(pipe(x), model(x), rtol=1e-10, atol=1e-10)


COLLECTED: contextvars.ContextVar[Any] = contextvars.ContextVar("COLLECTED", default=None)


class Records(Two):
    """Puts a hook into a module in its first call, and collects the results, like models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.hooked = nn.Sequential(nn.Linear(4, 4)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.part.register_forward_hook(lambda module, given, out: COLLECTED.get().append(out))
            self.hooked = True
        collected: list[Tensor] = []
        token = COLLECTED.set(collected)
        out: Tensor = self.b(torch.tanh(self.part(self.a(x))))
        COLLECTED.reset(token)
        return out * torch.stack(collected).sum()


def test_hooks_of_a_first_call_are_put_in_once() -> None:
    """The trial of a first call used to repeat it with the hooks of the earlier call, and was refused."""
    torch.manual_seed(0)
    model, x = Records().double(), torch.randn(8, 4).double()
    with fxsplit.compile(model, 2, passes=FAST, n_microbatches=1) as pipe:
        found = pipe(x)
        assert not model.hooked and not model.part._forward_hooks
        torch.testing.assert_close(found, model(x), rtol=1e-10, atol=1e-10)
