"""The point at which a front end stopped: the operator, the submodule and the user's line, the last front end first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.errors import TraceError
from fxsplit.frontend.stop_point import find_stopped
from tests.support.models import FAST

library = torch.library.Library("fxsplit_stopped", "DEF")
library.define("shapeless(Tensor x) -> Tensor")
library.impl("shapeless", torch.clone, "CPU")
library.define("picky(Tensor x) -> Tensor")
library.impl("picky", torch.clone, "CPU")


def refuse(x: Tensor) -> Tensor:
    raise RuntimeError("picky wants bfloat16")


library.impl("picky", refuse, "Meta")
library.define("fussy(Tensor x) -> Tensor")
for place in ("CPU", "Meta"):
    library.impl("fussy", refuse, place)


class Inner(nn.Module):
    """Decides by a shape, which symbolic tracing cannot follow, and then calls `then`."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if h.shape[0] > 100:
            h = h + 1
        return self.then(h)


class Outer(nn.Module):
    """Reads the output of its submodule, so that keeping the submodule whole does not help."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = Inner(then)

    def forward(self, x: Tensor) -> Any:
        h = self.inner(x)
        return h if float(h.detach().sum()) < 1e6 else h * 2


def decide(h: Tensor) -> Tensor:
    return h * 2 if h.sum() > 0 else h


def call_shapeless(h: Tensor) -> Any:
    return torch.ops.fxsplit_stopped.shapeless(h)


def call_picky(h: Tensor) -> Any:
    return torch.ops.fxsplit_stopped.picky(h)


@pytest.mark.parametrize(
    ("then", "line", "reason"),
    [
        (decide, "return h * 2 if h.sum", "data-dependent"),
        (call_shapeless, "shapeless", "fxsplit_stopped.shapeless.default has no kernel that computes only shapes"),
        (call_picky, "picky", "in operator fxsplit_stopped.picky.default: picky wants bfloat16"),
    ],
)
def test_what_stopped_the_export_comes_first(
    then: Callable[[Tensor], Any], line: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TraceError) as caught:
        fxsplit.compile(Outer(then), 2, example_inputs=torch.randn(8, 4), passes=FAST)
    export, _, symbolic = str(caught.value).partition(". Before that, ")
    assert export.startswith("torch.export cannot follow Outer in submodule 'inner' at ")
    assert "test_stop_point.py:" in export and line in export and reason in export
    assert symbolic.startswith("symbolic tracing cannot follow Outer in submodule 'inner'")
    assert capfd.readouterr().err == "", "torch's own logs say it in sixty lines"


def test_what_stops_a_model_on_stand_ins_is_named_and_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    with fxsplit.without_weights():
        model = nn.Sequential(nn.Linear(4, 4), Inner(torch.ops.fxsplit_stopped.fussy))
    with pytest.raises(TraceError, match=r"in submodule '1' at .*test_stop_point.py:\d+.*fussy.default: picky wants"):
        fxsplit.compile(model, 2, example_inputs=torch.randn(8, 4), passes=FAST)
    assert capfd.readouterr().err == ""


def test_an_error_that_was_raised_anew_is_looked_for_where_it_began() -> None:
    model = Inner(decide)

    def run() -> None:
        try:
            model(torch.ones(2, 3))
        except RuntimeError as error:
            raise ValueError("something failed") from error

    with pytest.raises(ValueError, match="something failed") as caught:
        run()
    found = find_stopped(model, caught.value)
    assert "h = self.a(x)" in found.line and found.submodule == "a" and found.operator is None
    assert str(find_stopped(model, ValueError())) == ": ValueError"
