"""Splits by hand, and the plans that they make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fxsplit.api.plan import lay_out
from fxsplit.api.toolkit.from_file import make_graph
from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import CostModel
from fxsplit.ir.facts.split import cut_before, find_split
from fxsplit.ir.graph import IR
from tests.support.graphs import node


def make_costs(**options: Any) -> Costs:
    """Return the costs of a chain a, b, c, d of 1, 2, 3 and 4 ms, with a second branch e from a to d."""
    edges = {"a": "", "b": "a", "e": "a", "c": "b", "d": "ce"}
    times = {"a": 1.0, "b": 2.0, "e": 1.0, "c": 3.0, "d": 4.0}
    modules = {"a": "one.0", "b": "one.1", "e": "side", "c": "two", "d": "head"}
    nodes = tuple(replace(node(name, [*edges[name]], times[name]), module=modules[name]) for name in edges)
    return Costs(nodes, (), ("d",), rows=1, **options)


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        (cut_before("two"), [["a", "b", "e"], ["c", "d"]]),
        (cut_before("head", "one.1"), [["a"], ["b", "e", "c"], ["d"]]),
        ({"two": 1}, [["a", "b", "e"], ["c", "d"]]),
        ({"one": 0, "side": 1, "d": 2}, [["a", "b", "c"], ["e"], ["d"]]),
        ([["one"], ["side", "two"], ["head"]], [["a", "b"], ["e", "c"], ["d"]]),
        ([["a"], ["b"]], [["a", "e"], ["b", "c", "d"]]),
        ({}, [["a", "b", "e", "c", "d"]]),
    ],
)
def test_splits(split: Any, parts: list[list[str]]) -> None:
    assert find_split(make_costs(), split, 3) == parts


def test_a_node_goes_with_those_that_it_must_stay_with() -> None:
    assert find_split(make_costs(together=(("e", "c"),)), {"c": 1}, 2) == [["a", "b"], ["e", "c", "d"]]


@pytest.mark.parametrize(
    ("split", "error"),
    [
        ({"tow": 1}, "cannot split at 'tow': no such submodule or node in the graph; did you mean 'two'?"),
        (cut_before("a"), "no stage can end before 'one.0 (a)', which is the first node of the graph"),
        ({"two": 3}, "the split has 4 stages for 3 devices"),
        ({"two": 2}, "stage 1 of the split has no nodes: number the stages from 0, without gaps"),
        ([["one"], ["a", "two"]], "node 'a' is in stage 0 and in stage 1 of the split: keep one"),
        ({"two": "1"}, "'two': '1' in a split: give the name of a node, and the number of a stage"),
        ({"two": -1}, "'two': -1 in a split"),
    ],
)
def test_wrong_splits_are_named(split: Any, error: str) -> None:
    with pytest.raises(PlanError) as raised:
        find_split(make_costs(), split, 3)
    assert error in str(raised.value)


def make_ir(costs: Costs, devices: int = 2, **options: Any) -> IR:
    """Return an IR that plans from these costs."""
    return IR(make_graph(costs)).learn(*lay_out(Machine.planned(devices, **options), "1F1B", 4), costs)  # type: ignore[arg-type]


def test_a_split_is_priced_and_not_proven() -> None:
    plan = Plan.of(make_ir(make_costs()), cut_before("two"), recompute=[1])
    assert [s.forward_ms for s in plan.stages] == [4.0, 7.0] and [s.recompute for s in plan.stages] == [False, True]
    assert plan.standing == "not proven" and plan.lower_bound_ms == 0.0 and plan.single_ms > 0
    assert Plan.of(make_ir(make_costs()), {"c": 1}, model=CostModel("overlapped")).model.name == "overlapped"


def test_the_workload_says_whether_stages_recompute() -> None:
    ir = make_ir(make_costs())
    always = ir.learn(replace(ir[Workload], recompute="always"))
    assert [s.recompute for s in Plan.of(always, cut_before("two")).stages] == [True, True]
    assert [s.recompute for s in Plan.of(always, cut_before("two"), recompute=[]).stages] == [False, False]
    for odd in (3, [2], "always"):
        with pytest.raises(PlanError, match="recompute"):
            Plan.of(ir, cut_before("two"), recompute=odd)  # type: ignore[arg-type]


def test_a_split_needs_places_and_nodes() -> None:
    with pytest.raises(PlanError, match=r"cut_before\(\) names no place"):
        cut_before()
    with pytest.raises(PlanError, match="stage 1 of the split has no nodes"):
        Plan.of(make_ir(make_costs()), [["a", "b", "c"], []])
    with pytest.raises(PlanError, match="a graph without nodes has no stages"):
        find_split(Costs((), (), ()), {"a": 0}, 2)
    with pytest.raises(PlanError, match="did you mean 'one'"):
        Plan.of(make_ir(make_costs()), {"onne": 1})


def test_a_split_that_cannot_run_is_refused() -> None:
    with pytest.raises(PlanError, match="this split cannot run: node 'c' reads 'b' from a later stage"):
        Plan.of(make_ir(make_costs()), {"b": 1, "c": 0})
    with pytest.raises(PlanError, match="this split cannot run: nodes a, b must stay together"):
        Plan.of(make_ir(make_costs(together=(("a", "b"),))), {"a": 0, "b": 1})
    heavy = Costs((node("a", parameter_bytes=1e6), node("b", ["a"])), (), ("b",), rows=1)
    with pytest.raises(PlanError, match="this split cannot run: stage 0 needs"):
        Plan.of(make_ir(heavy, memory_bytes=1e5), {"b": 1})
