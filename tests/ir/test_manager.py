"""The manager runs passes and names the one that breaks a fact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

import fxsplit
from fxsplit import DEFAULT, IR, Plan
from fxsplit.errors import BrokenFact
from tests.models import Residual
from tests.own_passes import copied


def x() -> torch.Tensor:
    return torch.randn(8, 3, 8, 8)


def test_a_pass_that_breaks_a_fact_is_named() -> None:
    def forget_a_node(ir: IR) -> IR:
        graph, made = copied(ir.gm.graph)
        extra = next(iter(made.values()))
        with graph.inserting_after(extra):
            graph.call_function(torch.relu, (extra,))
        return ir.rewrite(fx.GraphModule(ir.gm, graph), *ir.facts)

    with pytest.raises(BrokenFact, match="after pass 'forget-a-node': the costs are of other nodes than the graph"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=DEFAULT.after("profile", forget_a_node))


def test_a_fact_that_cannot_even_be_verified_is_named() -> None:
    """The user got a bare "tuple index out of range", and neither the pass nor the fact."""

    def use_a_ninth_device(ir: IR) -> IR:
        first, *rest = ir[Plan].stages
        return ir.learn(replace(ir[Plan], stages=(replace(first, devices=(9,)), *rest)))

    with pytest.raises(BrokenFact, match=r"after pass 'use-a-ninth-device': stage 0 is on devices \[9\]: give numbers"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=DEFAULT.after("partition", use_a_ninth_device))


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    """The user got what torch says of an unsound graph, and not whose graph it is."""

    def call_a_ghost(ir: IR) -> IR:
        graph, made = copied(ir.gm.graph)
        gm = fx.GraphModule(ir.gm, graph)
        next(node for node in made.values() if node.op == "call_module").target = "ghost"
        return ir.rewrite(gm)

    with pytest.raises(BrokenFact, match=r"after pass 'call-a-ghost': the graph does not hold \(RuntimeError.*ghost"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=[call_a_ghost, *DEFAULT])
