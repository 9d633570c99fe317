"""Pins: submodules that stay on a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fxsplit
from fxsplit.errors import MissingFact, PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.pins import Pins, suggest_names
from tests.support.graphs import node
from tests.support.models import Residual


def test_pins_are_kept_or_refused() -> None:
    """It would be wrong if a late pin, two pins of one module, or a pin without a module were passed over."""

    def pin(stage: int, path: str = "head") -> Any:
        return lambda ir: fxsplit.Pins.add(ir, {path: stage})

    images = torch.randn(8, 3, 8, 8)
    message = r"no Plan any more .* it derives from Pins, which is another one since: run partition again"
    with pytest.raises(MissingFact, match=message):
        fxsplit.compile(Residual(), 2, example_inputs=images, passes=fxsplit.DEFAULT.after("partition", pin(0)))
    with pytest.raises(PlanError, match="'head' is pinned to stage 0 and to stage 1: keep one"):
        fxsplit.compile(Residual(), 2, example_inputs=images, passes=[pin(0), pin(1), *fxsplit.DEFAULT])
    with pytest.raises(PlanError, match="names no submodule"):
        fxsplit.compile(Residual(), 2, example_inputs=images, passes=[pin(0, ""), *fxsplit.DEFAULT])


def test_a_name_is_suggested_once() -> None:
    """A submodule and its node have one name, which was suggested twice."""
    nodes = [node("stem", []), node("head", ["stem"])]
    costs = Costs(tuple(replace(one, module=one.name) for one in nodes), (), ("head",), rows=1)
    assert suggest_names(costs, "haed").endswith("did you mean 'head'?")
    assert "did you mean" not in suggest_names(costs, "zzz") and "there are 'head'" in suggest_names(costs, "zzz")


def test_pins_are_joined_and_the_later_ones_count() -> None:
    joined = Pins.join([Pins({"a": 0, "b": 1}, frozenset({"a"})), Pins({"b": 2, "c": 1}, frozenset({"c"}))])
    assert joined == Pins({"a": 0, "b": 2, "c": 1}, frozenset({"a", "c"}))
    assert Pins.join([]) == Pins({})
