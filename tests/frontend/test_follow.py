"""Which numbers become inputs of a graph, and which stay constants of it because forward() does more with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxsplit
from fxsplit.frontend.capture import capture
from fxsplit.ir.facts.capture.numbers import list_number_nodes, set_numbers
from fxsplit.ir.facts.capture.python_state import PythonState
from fxsplit.ir.graph import IR
from tests.support.models import FAST, Two

Use = Callable[[Any, Tensor], Tensor]


class Uses(Two):
    """Uses the numbers, with `use`, on its inner values."""

    def __init__(self, use: Use, *, exported: bool) -> None:
        super().__init__()
        self.use, self.exported = use, exported
        self.rate, self.other = 1.0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.use(self, self.a(x))
        # Symbolic tracing cannot follow this.
        if self.exported and x.shape[1] > 100:
            h = h * 2
        result: Tensor = self.b(h)
        return result


def capture_changed(model: Any, **changed: float) -> IR:
    """Return the graph that is made when numbers have changed since the first one."""
    x = torch.randn(6, 4)
    first = capture(model, (x,), {}, rows=3)
    for name, value in changed.items():
        setattr(model, name, value)
    return capture(model, (x,), {}, rows=3, earlier=[first])


def list_followed(ir: IR) -> list[str]:
    return [number.place.name for number in ir[PythonState].followed]


FOLLOWED: dict[str, Use] = {
    "divisor": lambda m, h: h / m.rate,
    "one minus": lambda m, h: m.rate * h + (1 - m.rate) * h.relu(),
    "exponent": lambda m, h: h.abs() ** m.rate,
    "argument": lambda m, h: F.leaky_relu(h, m.rate),
    "of a number": lambda m, h: h * torch.full((), m.rate) if not m.exported else h * m.rate,
    "of whole numbers": lambda m, h: h + torch.arange(4) * m.rate,
    "functional dropout": lambda m, h: F.dropout(h, m.rate * 0, m.training),
}


def exports_exponents() -> bool:
    """Return whether torch exports a power without asking whether its exponent is 1, as torch 2.11 does."""

    class Power(nn.Module):
        def forward(self, x: Tensor, rate: Tensor) -> Tensor:
            result: Tensor = x ** rate.item()
            return result

    try:
        torch.export.export(Power(), (torch.ones(2), torch.tensor(0.75, dtype=torch.float64)), strict=False)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_changed_number_becomes_an_input(kind: str, exported: bool) -> None:
    model = Uses(FOLLOWED[kind], exported=exported)
    ir = capture_changed(model, rate=0.75)
    if exported and kind == "exponent" and not exports_exponents():
        assert list_followed(ir) == [] and len(ir[PythonState].stuck) == 1
        torch.testing.assert_close(ir.gm(torch.ones(2, 4)), model(torch.ones(2, 4)))
        return
    assert list_followed(ir) == ["attribute 'rate' of the model"] and not ir[PythonState].stuck
    (node,) = list_number_nodes(ir.gm.graph)
    assert (node.target, node.args) == ("rate", (0.75,)), "without a value the graph runs with that of the capture"
    x = torch.randn(2, 4)
    torch.testing.assert_close(ir.gm(x), model(x))
    model.rate = 0.25
    torch.testing.assert_close(ir.gm(x, 0.25), model(x))
    set_numbers(ir.gm, [0.25])
    torch.testing.assert_close(ir.gm(x), model(x))


def by_type(m: Any, h: Tensor) -> Tensor:
    """Scale by a float, but not by a proxy in its place."""
    return h * m.rate if isinstance(m.rate, float) else h


STUCK: dict[str, Use] = {
    "branch": lambda m, h: h * 2 if m.rate > 0.7 else h * m.rate,
    "bound": lambda m, h: h * max(m.rate, 0.7),
    "whole number": lambda m, h: h * int(m.rate * 3),
    "tensor": lambda m, h: h * torch.tensor(m.rate),
    "text": lambda m, h: h * float(f"{m.rate:.1f}"),
    "type": by_type,
}


@pytest.mark.parametrize("kind", STUCK)
def test_a_number_that_decides_something_stays_a_constant(kind: str) -> None:
    """The last one is only right for 1.0, so it is compared with another value too."""
    model = Uses(STUCK[kind], exported=False)
    model.rate = 0.5
    ir = capture_changed(model, rate=1.0)
    state = ir[PythonState]
    assert not state.followed and len(state.stuck) == 1 and not list_number_nodes(ir.gm.graph)
    x = torch.randn(2, 4)
    torch.testing.assert_close(ir.gm(x), model(x))
    # It is not attempted again, and the change of the number is still reported.
    model.rate = 0.25
    assert list(state.find_changes()) == ["attribute 'rate' of the model"] and not state.list_numbers()
    again = capture(model, (torch.randn(6, 4),), {}, rows=3, earlier=[ir])[PythonState]
    assert again.stuck == state.stuck and not again.followed


def test_an_exported_branch_stays_a_constant() -> None:
    ir = capture_changed(Uses(lambda m, h: h * (2 if m.rate > 0.7 else m.rate), exported=True), rate=0.5)
    assert not list_followed(ir) and len(ir[PythonState].stuck) == 1


def test_one_number_in_the_way_is_left_out() -> None:
    model = Uses(lambda m, h: h * m.rate if m.other > 0.4 else h, exported=False)
    ir = capture_changed(model, rate=2.0, other=0.75)
    assert list_followed(ir) == ["attribute 'rate' of the model"] and len(ir[PythonState].stuck) == 1


def test_a_rate_that_may_be_zero_is_a_constant_where_memory_depends_on_it() -> None:
    """Dropout returns its input at 0, and a write to that would reach into another stage."""
    in_place = Uses(lambda m, h: F.dropout(h * 1, m.rate, m.training).add_(1), exported=False)
    in_place.rate = 0.5
    assert not list_followed(capture_changed(in_place, rate=0.25))
    model = Uses(lambda m, h: F.dropout(h, m.rate, m.training), exported=False)
    model.rate = 0.0
    ir = capture_changed(model, rate=0.25)
    assert not list_followed(ir), "at 0 nothing is drawn, and a node that draws needs a state of its own"


def test_numbers_of_one_name_and_of_an_argument_have_inputs_of_their_own() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Uses(lambda m, h: h * m.rate, exported=False)
            self.two = Uses(lambda m, h: h * math.sqrt(m.rate), exported=False)

        def forward(self, rate: Tensor) -> Tensor:
            out: Tensor = self.two(self.one(rate))
            return out

    model, x = Nested(), torch.randn(6, 4)
    first = capture(model, (x,), {}, rows=3)
    model.one.rate, model.two.rate = 2.0, 3.0
    ir = capture(model, (x,), {}, rows=3, earlier=[first])
    assert [n.target for n in list_number_nodes(ir.gm.graph)] == ["rate_", "rate__"]
    model.one.rate, model.two.rate = 4.0, 5.0
    torch.testing.assert_close(ir.gm(x, *ir[PythonState].read_numbers({})), model(x))


def test_a_graph_that_was_given_holds_what_it_holds() -> None:
    model = torch.fx.symbolic_trace(Uses(lambda m, h: h * m.rate, exported=False))
    assert not capture(model, (torch.randn(6, 4),), {}, rows=3)[PythonState].followed


class Kept:
    """Converts a number to another type."""

    def __init__(self) -> None:
        self.rate = 1.0

    @functools.cached_property
    def doubled(self) -> float:
        return self.rate * 2


def test_a_number_behind_a_cache_is_followed_as_a_model_with_an_empty_one_computes() -> None:
    """Its graph was made and checked with a cache that the model's own run had filled, and so held its last value."""
    model: Any = Uses(lambda m, h: h * m.kept.doubled, exported=False)
    model.kept = Kept()
    x = torch.randn(6, 4)
    with fxsplit.compile(model, 2, passes=FAST) as pipe:
        for rate in (1.0, 3.0, 4.0, 5.0, 3.0):
            model.kept.rate = rate
            vars(model.kept).pop("doubled", None)
            found = pipe(x)
            torch.testing.assert_close(found, model(x))


class Returns(Uses):
    """Returns numbers beside a tensor."""

    def forward(self, x: Tensor) -> Any:
        return self.use(self, self.a(x) * (2 if self.exported and x.shape[1] > 100 else 1))


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    "use",
    [lambda m, h: (h * m.rate, m.rate), lambda m, h: {"y": h * m.rate, "n": [2 * m.rate + 1]}],
    ids=["itself", "a number made of it"],
)
def test_a_number_that_is_returned_stays_a_constant(use: Any, exported: bool) -> None:
    """Stages hand on only tensors, so the number that the model returns is a constant of the graph."""
    model = Returns(use, exported=exported)
    x = torch.randn(8, 4)
    with fxsplit.compile(model, 2, n_microbatches=2, passes=FAST) as pipe:
        pipe(x)
        with pytest.warns(fxsplit.errors.FxsplitWarning, match="compiling again"):
            for rate in (0.25, 0.5, 0.75, 0.25, 0.5):
                model.rate = rate
                torch.testing.assert_close(pipe(x), model(x))
