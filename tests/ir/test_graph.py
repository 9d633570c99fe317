"""The IR: facts by type, forgotten by a rewrite unless they are given or kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import fx, nn

from fxsplit import IR, Fact
from fxsplit.errors import MissingFact
from fxsplit.ir.graph import GivenFact, name_pass


@dataclass(frozen=True)
class OfRun(GivenFact):
    """A fact of the run."""

    number: int = 0

    made_by: ClassVar[str] = "compile"


@dataclass(frozen=True)
class OfGraph:
    """A fact of the graph."""

    number: int = 0

    made_by: ClassVar[str] = "my-pass"
    given: ClassVar[bool] = False

    def verify(self, ir: IR) -> None:
        """Hold."""


@dataclass(frozen=True)
class Other(OfGraph):
    """Another fact of the graph."""


def graph() -> fx.GraphModule:
    return fx.symbolic_trace(nn.Tanh())


def test_facts_are_found_by_their_type() -> None:
    ir = IR(graph())
    with pytest.raises(MissingFact, match=r"no OfGraph yet \(known: nothing\): run 'my-pass' earlier in the chain"):
        ir[OfGraph]
    assert ir.get(OfGraph) is None
    learned = ir.learn(OfGraph(1), OfRun())
    assert learned[OfGraph] == OfGraph(1) and ir.get(OfGraph) is None
    assert learned.learn(OfGraph(2))[OfGraph] == OfGraph(2)
    with pytest.raises(MissingFact, match=r"known: OfGraph, OfRun"):
        learned[Other]


def test_a_rewrite_forgets_what_is_of_the_graph_that_was() -> None:
    ir, other = IR(graph()).learn(OfGraph(), Other(), OfRun(3)), graph()
    bare = ir.rewrite(other)
    assert bare.gm is other and dict(bare.facts) == {OfRun: OfRun(3)}
    assert set(ir.rewrite(other, Other).facts) == {Other, OfRun}
    assert ir.rewrite(other, *ir.facts).facts == ir.facts


def test_a_given_fact_holds_for_any_graph() -> None:
    fact = OfRun()
    assert isinstance(fact, Fact) and fact.given
    fact.verify(IR(graph()))


def test_names_of_passes() -> None:
    class Named:
        name = "my-name"

    def fold_bn(ir: IR) -> IR:
        return ir

    assert [name_pass(step) for step in (Named(), fold_bn, OfRun())] == ["my-name", "fold-bn", "OfRun"]
