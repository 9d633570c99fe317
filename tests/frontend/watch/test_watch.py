"""Values that code reads are found for any type and followed when they change; nothing else is."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import InputError
from tests.support.models import FAST, Two

RATE = 1.0
TABLE = {"rate": 1.0}


class Kind(enum.Enum):
    ONE = 1.0
    TWO = 2.0


@dataclasses.dataclass
class Config:
    rate: float = 1.0
    inner: Any = None


class Slots:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


class Computed:
    """Finds its attributes in a dict, as configurations of libraries do."""

    def __init__(self) -> None:
        self.__dict__["content"] = {"rate": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["content"][name]


def scale(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


class Reads(Two):
    """Scales its outputs by the result of `read`."""

    factor: Any = 1.0

    def __init__(self, read: Callable[[Any, Tensor], Any], **held: Any) -> None:
        super().__init__()
        self.read = read
        self.__dict__.update(held)

    @property
    def doubled(self) -> Any:
        return 2 * vars(self)["hidden"]

    def get(self, name: str) -> Any:
        return getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h) * self.read(self, h)
        return out


def change_global(model: Any) -> None:
    global RATE
    RATE += 1


def make_closure() -> tuple[Callable[[Any, Tensor], Any], Callable[[Any], None]]:
    rate = 1.0

    def read(model: Any, h: Tensor) -> Any:
        return rate

    def change(model: Any) -> None:
        nonlocal rate
        rate += 1

    return read, change


def each(model: Any, h: Tensor) -> float:
    total = 0.0
    for config in model.configs:
        total += config.rate
    return total


def by_helper(model: Any, h: Tensor) -> Any:
    config = model.registry.find("x")
    return config.inner.rate


class Registry:
    def __init__(self, **held: Any) -> None:
        self.held = held

    def find(self, name: str) -> Any:
        return self.held[name]


def patch_class(model: Any) -> None:
    kind = type(model)
    kind.extra = kind.extra + 1 if "extra" in vars(kind) else 3.0


READS: dict[str, tuple[dict[str, Any], Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": ({"rate": 1.0}, lambda m, h: m.rate, lambda m: setattr(m, "rate", 2.0)),
    "attribute by getattr": ({"rate": 1.0}, lambda m, h: m.get("rate"), lambda m: setattr(m, "rate", 2.0)),
    "attribute by a name put together": (
        {"rate_1": 1.0, "index": 1},
        lambda m, h: getattr(m, f"rate_{m.index}"),
        lambda m: setattr(m, "rate_1", 2.0),
    ),
    "class attribute": ({}, lambda m, h: m.factor, lambda m: setattr(m, "factor", 2.0)),
    "property": ({"hidden": 1.0}, lambda m, h: m.doubled, lambda m: setattr(m, "hidden", 2.0)),
    "global": ({}, lambda m, h: RATE, change_global),
    "global dict": ({}, lambda m, h: TABLE["rate"], lambda m: TABLE.update(rate=TABLE["rate"] + 1)),
    "closure": ({}, *make_closure()),
    "dict": ({"cfg": {"rate": 1.0}}, lambda m, h: m.cfg["rate"], lambda m: m.cfg.update(rate=2.0)),
    "dict by get": ({"cfg": {"rate": 1.0}}, lambda m, h: m.cfg.get("rate"), lambda m: m.cfg.update(rate=2.0)),
    "dict in dict": ({"cfg": {"a": {"b": 1.0}}}, lambda m, h: m.cfg["a"]["b"], lambda m: m.cfg["a"].update(b=2.0)),
    "list": ({"cfg": [1.0]}, lambda m, h: m.cfg[0], lambda m: m.cfg.__setitem__(0, 2.0)),
    "length of a list": ({"cfg": [1.0]}, lambda m, h: len(m.cfg), lambda m: m.cfg.append(2.0)),
    "set": ({"cfg": {1}}, lambda m, h: len(m.cfg), lambda m: m.cfg.add(2)),
    "deque": ({"cfg": collections.deque([1.0])}, lambda m, h: m.cfg[0], lambda m: m.cfg.appendleft(2.0)),
    "dataclass": ({"cfg": Config()}, lambda m, h: m.cfg.rate, lambda m: setattr(m.cfg, "rate", 2.0)),
    "dataclass in dataclass": (
        {"cfg": Config(inner=Config())},
        lambda m, h: m.cfg.inner.rate,
        lambda m: setattr(m.cfg.inner, "rate", 2.0),
    ),
    "text": ({"cfg": Config()}, lambda m, h: eval("c.rate", {"c": m.cfg}), lambda m: setattr(m.cfg, "rate", 2.0)),
    "namespace": (
        {"cfg": types.SimpleNamespace(rate=1.0)},
        lambda m, h: m.cfg.rate,
        lambda m: setattr(m.cfg, "rate", 2.0),
    ),
    "slots": ({"cfg": Slots()}, lambda m, h: m.cfg.rate, lambda m: setattr(m.cfg, "rate", 2.0)),
    "computed": ({"cfg": Computed()}, lambda m, h: m.cfg.rate, lambda m: m.cfg.content.update(rate=2.0)),
    "user dict": (
        {"cfg": collections.UserDict(rate=1.0)},
        lambda m, h: m.cfg["rate"],
        lambda m: m.cfg.update(rate=2.0),
    ),
    "each of a list": ({"configs": [Config(), Config()]}, each, lambda m: setattr(m.configs[1], "rate", 3.0)),
    "comprehension": (
        {"configs": [Config(), Config()]},
        lambda m, h: sum([c.rate for c in m.configs]),
        lambda m: setattr(m.configs[1], "rate", 3.0),
    ),
    "helper": (
        {"registry": Registry(x=Config(inner=Config()))},
        by_helper,
        lambda m: setattr(m.registry.held["x"].inner, "rate", 2.0),
    ),
    "enum": (
        {"kind": Kind.ONE},
        lambda m, h: 1.0 if m.kind is Kind.ONE else 3.0,
        lambda m: setattr(m, "kind", Kind.TWO),
    ),
    "dtype": (
        {"kind": torch.float32},
        lambda m, h: 1.0 if m.kind == torch.float32 else 3.0,
        lambda m: setattr(m, "kind", torch.float64),
    ),
    "numpy": ({"rate": np.float64(1.0)}, lambda m, h: float(m.rate), lambda m: setattr(m, "rate", np.float64(2.0))),
    "function": ({"act": torch.tanh}, lambda m, h: m.act(h), lambda m: setattr(m, "act", torch.relu)),
    "method": ({}, lambda m, h: m.get("factor"), lambda m: setattr(m, "get", lambda name: 7.0)),
    "partial": (
        {"act": functools.partial(scale, by=2.0)},
        lambda m, h: m.act(h),
        lambda m: m.act.keywords.update(by=3.0),
    ),
    "environment": (
        {},
        lambda m, h: float(os.environ.get("FXSPLIT_TEST_RATE", "1")),
        lambda m: os.environ.__setitem__("FXSPLIT_TEST_RATE", "2"),
    ),
    "environment by getenv": (
        {},
        lambda m, h: float(os.getenv("FXSPLIT_TEST_RATE") or 1),
        lambda m: os.environ.__setitem__("FXSPLIT_TEST_RATE", "3"),
    ),
    "whether there is": (
        {},
        lambda m, h: 2.0 if hasattr(m, "later") else 1.0,
        lambda m: setattr(m, "later", True),
    ),
    "default dtype": (
        {},
        lambda m, h: 1.0 if torch.get_default_dtype() == torch.float32 else 2.0,
        lambda m: torch.set_default_dtype(torch.float64),
    ),
    "default dtype of what is made": (
        {},
        lambda m, h: float(1e8 * (torch.tensor(0.1).double() * 10 - 1)),
        lambda m: torch.set_default_dtype(torch.float64),
    ),
}


NUMBERS = (
    *("attribute", "attribute by getattr", "attribute by a name put together", "property", "global", "closure"),
    *("dataclass", "dataclass in dataclass", "text", "namespace", "slots", "each of a list", "comprehension", "helper"),
)
"""Reads that become inputs of the graph: floats in places of their own that the code only does arithmetic with."""


@pytest.mark.parametrize("kind", READS)
def test_what_forward_reads_is_followed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all these only numbers that lie directly in a module were once followed."""
    monkeypatch.delenv("FXSPLIT_TEST_RATE", raising=False)
    held, read, change = READS[kind]
    model, x = Reads(read, **held), torch.randn(8, 4)
    try:
        with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
            before = model(x)
            torch.testing.assert_close(pipe(x), before)
            change(model)
            after = model(x)
            assert not torch.equal(before, after)
            warns = pytest.warns(fxsplit.FxsplitWarning, match="compiling again, because .* changed from .* forward")
            with contextlib.nullcontext() if kind in NUMBERS else warns as said:
                found = pipe(x)
            assert said is None or said[0].filename == __file__
            torch.testing.assert_close(found, after)
            torch.testing.assert_close(pipe(x), after)  # without a warning, which is an error here
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_method_replaced_in_the_class_is_followed() -> None:
    class Derived(ByFlag):
        pass

    model, x = Derived(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        pipe(x)
        Derived.forward = lambda self, x: self.b(torch.relu(self.a(x)))  # type: ignore[method-assign]
        with pytest.warns(fxsplit.FxsplitWarning, match=r"class attribute 'ByFlag.forward' changed"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))


def test_what_forward_does_not_read_costs_no_compile() -> None:
    """A counter next to the layers used to cost a compile at every call."""
    model: Any = Reads(lambda m, h: m.cfg.rate, cfg=Config(), steps=0)
    x = torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        program = pipe.compiler.get_compiled("train")
        model.steps += 1
        model.cfg.inner = 5
        model.cfg = dataclasses.replace(model.cfg) if False else model.cfg
        pipe(x)
        assert pipe.compiler.get_compiled("train") is program


class ByMode(Two):
    """Asks torch for its modes."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        if torch.is_autocast_enabled("cpu"):
            out = out.float() * 2
        return out * 3 if torch.is_grad_enabled() else out


def test_modes_that_forward_asks_for_are_followed_and_kept() -> None:
    """`torch.is_autocast_enabled` used to keep its first value; `is_grad_enabled` was refused as a random draw."""
    model, x = ByMode(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        with (
            pytest.warns(fxsplit.FxsplitWarning, match=r"is_autocast_enabled\('cpu'\) changed from False to True"),
            torch.autocast("cpu", torch.bfloat16),
        ):
            found = pipe(x)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, model(x))
        with pytest.warns(fxsplit.FxsplitWarning, match="compiling again"), torch.no_grad():
            torch.testing.assert_close(pipe(x), model(x))
        # All three are compiled by now, and none is compiled again: a warning is an error here.
        for _ in range(2):
            torch.testing.assert_close(pipe(x), model(x))
            with torch.no_grad():
                torch.testing.assert_close(pipe(x), model(x))
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(pipe(x), model(x))


class ByFlag(Two):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out * 2 if self.b.weight.requires_grad else out


def test_a_weight_that_is_frozen_is_followed_where_forward_asks() -> None:
    """`requires_grad` read in an exported graph kept its branch when the weight was frozen later."""
    model, x = ByFlag(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        model.b.requires_grad_(False)
        with pytest.warns(fxsplit.FxsplitWarning, match=r"'b.weight.requires_grad' of the model changed from True"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))
        found.sum().backward()
        assert model.b.weight.grad is None and model.a.weight.grad is not None


def test_what_no_graph_can_be_made_with_is_refused() -> None:
    """Under inference_mode a graph is made without it, and every call would have compiled again."""

    class ByInference(Two):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.a(x))
            return out * 2 if torch.is_inference_mode_enabled() else out

    model, x = ByInference(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST) as pipe:
        with (
            torch.inference_mode(),
            pytest.warns(fxsplit.FxsplitWarning, match="compiling again"),
            pytest.raises(InputError, match=r"reads torch.is_inference_mode_enabled\(\), which is True in this call"),
        ):
            pipe(x)
        torch.testing.assert_close(pipe(x), model(x))


def test_torchs_own_modules_read_what_they_keep() -> None:
    """In an exported graph LayerNorm.eps kept its value."""

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(self.norm(self.a(x)))
            return out if x.shape[1] > 2 else out * 2

    model, x = Exported(), torch.randn(8, 4)
    with fxsplit.compile(model, 2, example_inputs=x, passes=FAST, n_microbatches=2) as pipe:
        assert pipe.front_end == "export"
        model.norm.eps = 0.5
        with pytest.warns(fxsplit.FxsplitWarning, match=r"'norm.eps' of the model changed from 1e-05 to 0.5"):
            found = pipe(x)
        torch.testing.assert_close(found, model(x))
