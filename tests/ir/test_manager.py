"""The manager runs passes and names the one that breaks a fact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

import fxsplit
from fxsplit import DEFAULT, IR, Plan
from fxsplit.errors import BrokenFact, ChainError
from tests.support.models import Residual
from tests.support.own_passes import copied


def x() -> torch.Tensor:
    return torch.randn(8, 3, 8, 8)


def test_a_pass_that_breaks_a_fact_is_named() -> None:
    def forget_a_node(ir: IR) -> IR:
        graph, made = copied(ir.gm.graph)
        extra = next(iter(made.values()))
        with graph.inserting_after(extra):
            graph.call_function(torch.relu, (extra,))
        return ir.rewrite(fx.GraphModule(ir.gm, graph), *ir.facts)

    with pytest.raises(BrokenFact, match="after pass 'forget-a-node': the costs describe other nodes than the graph"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=DEFAULT.after("profile", forget_a_node))


def test_a_fact_that_cannot_even_be_verified_is_named() -> None:
    """The user got a bare "tuple index out of range", and neither the pass nor the fact."""

    def use_a_ninth_device(ir: IR) -> IR:
        first, *rest = ir[Plan].stages
        return ir.learn(replace(ir[Plan], stages=(replace(first, devices=(9,)), *rest)))

    with pytest.raises(BrokenFact, match=r"after pass 'use-a-ninth-device': stage 0 is on devices \[9\]: give numbers"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=DEFAULT.after("partition", use_a_ninth_device))


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    """The error used to be torch's own about an unsound graph, without the pass that made it."""

    def call_a_ghost(ir: IR) -> IR:
        graph, made = copied(ir.gm.graph)
        gm = fx.GraphModule(ir.gm, graph)
        next(node for node in made.values() if node.op == "call_module").target = "ghost"
        return ir.rewrite(gm)

    with pytest.raises(BrokenFact, match=r"after pass 'call-a-ghost': the graph does not hold \(RuntimeError.*ghost"):
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=[call_a_ghost, *DEFAULT])


def raise_key_error(ir: IR) -> IR:
    return dict[str, IR]()["nope"]


def raise_in_the_model(ir: IR) -> IR:
    ir.gm(torch.randn(2, 2))
    return ir


class Odd:
    """A fact with a check that raises an error of another class."""

    made_by: ClassVar[str] = "odd"
    given: ClassVar[bool] = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    def verify(self, ir: IR) -> None:
        """Fail."""
        raise self.error

    def __str__(self) -> str:
        raise ZeroDivisionError("no text")


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (raise_key_error, KeyError),
        (raise_in_the_model, RuntimeError),
        (lambda ir: ir.learn(Odd(KeyError("a"))), BrokenFact),
        (lambda ir: ir.learn(Odd(AssertionError("b"))), BrokenFact),
        (lambda ir: None, ChainError),
        (lambda ir: ir.gm, ChainError),
        (lambda: None, TypeError),
    ],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_error_of_a_pass_says_which_pass(step: Any, kind: type[Exception], mode: str) -> None:
    """Of all errors only a broken fact named its pass."""
    model = Residual().train(mode == "train")
    with pytest.raises(kind) as caught:
        fxsplit.compile(model, 2, example_inputs=x(), passes=DEFAULT.after("order", step))
    name = getattr(step, "__name__", "").replace("_", "-")
    assert f"in pass '{name}' (4 of 8) on Residual in {mode} mode" in caught.value.__notes__


def test_an_ir_that_cannot_be_shown_hides_no_error(tmp_path: Path) -> None:
    chain = DEFAULT.after("order", lambda ir: ir.learn(Odd(KeyError("a"))))
    with pytest.raises(BrokenFact, match=r"Odd does not hold \(KeyError: 'a'\)") as caught:
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=chain, dump=tmp_path)
    assert caught.value.__notes__[0] == "DumpTo could not show the IR (ZeroDivisionError: no text)"
