"""Reproducers are made small, and the pass still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

import fxsplit
from fxsplit.api.toolkit.from_file import read_planned
from fxsplit.api.toolkit.shrink import shrink
from fxsplit.errors import FxsplitError
from fxsplit.ir.facts.costs.costs import Costs, Exchange, InputCost, TiedParameter
from fxsplit.ir.graph import IR
from tests.support.graphs import node


def make_ir(seed: int, count: int = 24) -> IR:
    """Return the IR of a profile in which each node reads one or two of the nodes before it."""
    random = Random(seed)
    nodes = []
    for i in range(count):
        inputs = [f"n{random.randrange(i)}" for _ in range(min(i, 2))] or ["x"]
        nodes.append(node(f"n{i}", sorted(set(inputs)), kept_bytes=4.0))
    # Of a node that stays, in the test of each constraint, and one that goes.
    nodes[4] = replace(nodes[4], kept_for="n10", kept_for_bytes=2.0)
    nodes[9] = replace(nodes[9], lies_in="n8")
    read = {name for each in nodes for name in each.inputs}
    nodes[-1] = replace(nodes[-1], inputs=(*nodes[-1].inputs, *(n.name for n in nodes[:-1] if n.name not in read)))
    tied = (TiedParameter(4.0, 0.0, ("n2", "n5", "n7")),)
    costs = Costs(
        tuple(nodes), (InputCost("x", 4.0, 0.0),), (nodes[-1].name,), (("n3", "n4"),), (("n1", "n9"),), tied=tied
    )
    return read_planned(costs.to_text(), "p.json")


def find_error(step: Callable[[IR], IR], ir: IR) -> Exception:
    with pytest.raises(Exception) as raised:
        fxsplit.run(ir, [step])
    return raised.value


def fail_on(*names: str, kind: type[Exception] = ValueError) -> Callable[[IR], IR]:
    def fail(ir: IR) -> IR:
        known = {node.name for node in ir.gm.graph.nodes}
        if known.issuperset(names):
            raise kind(f"{names[-1]!r} has no rule, one of {len(known)} nodes")
        return ir

    return fail


@pytest.mark.parametrize("seed", range(6))
def test_only_the_nodes_that_fail_are_left(seed: int) -> None:
    ir = make_ir(seed)
    calls = [n.name for n in ir.gm.graph.nodes if n.op.startswith("call")]
    names = Random(seed).sample(calls, 2)
    step = fail_on(*names)
    small = shrink(ir, step, find_error(step, ir))
    assert {n.name for n in small.gm.graph.nodes if n.op.startswith("call")} == set(names)
    assert not small.facts and str(find_error(step, small)).startswith(repr(names[-1]))
    # What it is read from is as it was.
    assert len(ir.gm.graph.nodes) > 20 and Costs in ir.facts


def test_facts_that_the_failure_needs_stay_and_hold() -> None:
    def fail(ir: IR) -> IR:
        costs = ir[Costs]
        if costs.compute_ms > 12 and len(ir[fxsplit.Plan].stages) == 2:
            raise FxsplitError("too slow")
        return ir

    ir = fxsplit.run(make_ir(3), "even")
    small = shrink(ir, fail, find_error(fail, ir))
    assert {kind.__name__ for kind in small.facts} >= {"Costs", "Plan"}
    assert 3 < len(small.gm.graph.nodes) < len(ir.gm.graph.nodes) / 2
    for fact in small.facts.values():
        fact.verify(small)


def test_another_error_is_not_the_same() -> None:
    ir = make_ir(1)

    def fail(ir: IR) -> IR:
        raise (ValueError if len(ir.gm.graph.nodes) > 20 else KeyError)("no rule")

    small = shrink(ir, fail, find_error(fail, ir))
    assert len(small.gm.graph.nodes) == 21
    step = fail_on("n1")
    assert shrink(ir, step, ValueError("something else")) is ir
    assert shrink(ir, step, find_error(step, ir), limit_s=-1.0) is ir


def test_a_plan_may_lose_all_of_its_nodes() -> None:
    """A failure that needs no node at all once ended in an error of pricing no stages."""

    def fail(ir: IR) -> IR:
        raise RecursionError("too deep")

    ir = fxsplit.run(make_ir(5), "pin{module=n20,device=1},augment,order,partition")
    small = shrink(ir, fail, find_error(fail, ir))
    assert len(small.gm.graph.nodes) <= 2 and not small.facts


def test_the_error_names_the_same_node() -> None:
    def fail(ir: IR) -> IR:
        names = [node.name for node in ir.gm.graph.nodes if node.name in ("n3", "n9")]
        raise ValueError(f"no rule for {names[-1]!r}") if names else KeyError("nothing")

    ir = make_ir(2)
    small = shrink(ir, fail, find_error(fail, ir))
    assert str(find_error(fail, small)) == "no rule for 'n9'"
    assert [n.name for n in small.gm.graph.nodes if n.op.startswith("call")] == ["n9"]


CONSTRAINTS: dict[str, Callable[[Costs], object]] = {
    "ordered": lambda costs: costs.ordered == (("n1", "n9"),),
    "together": lambda costs: costs.together == (("n3", "n4"),),
    "tied": lambda costs: costs.tied and costs.tied[0].nodes == ("n2", "n5", "n7"),
    "exchanges": lambda costs: costs.exchanges and costs.exchanges[0].nodes == ("n6", "n8"),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_that_the_failure_needs_keeps_its_nodes(name: str) -> None:
    """All others go with their nodes, and the costs of what is left hold."""

    def fail(ir: IR) -> IR:
        if CONSTRAINTS[name](ir[Costs]):
            raise ValueError("no rule for this")
        return ir

    ir = make_ir(4)
    ir = ir.learn(replace(ir[Costs], exchanges=(Exchange(2.0, ("n6", "n8")),)))
    small = shrink(ir, fail, find_error(fail, ir))
    costs = small[Costs]
    costs.verify(small)
    needed = {"ordered": "n1 n9", "together": "n3 n4", "tied": "n2 n5 n7", "exchanges": "n6 n8"}
    assert {node.name for node in costs.nodes} == set(needed[name].split())
    left = {what: len(getattr(costs, what)) for what in CONSTRAINTS}
    assert left == {what: int(what == name) for what in CONSTRAINTS}
