"""Contracts of passes: what they say that they need, learn and keep is checked, and the pass is named with its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import BrokenFact, MissingFact
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.graph import IR


@dataclass(frozen=True)
class Act:
    """A pass that does `act`, with a contract of its own for each test."""

    act: Callable[[IR], IR]

    name: ClassVar[str] = "act"
    needs: ClassVar[tuple[type, ...]] = ()

    def __call__(self, ir: IR) -> IR:
        """Return what `act` makes."""
        return self.act(ir)


def make_ir() -> IR:
    """Return a profiled IR with two dropouts."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), nn.Dropout(0.2))
    return fxsplit.run(fxsplit.capture(model, torch.ones(8, 4), n_microbatches=2), "profile{repeats=1}")


def run(act: Callable[[IR], IR], **contract: Any) -> IR:
    """Run a pass with a contract."""
    return fxsplit.run(make_ir(), [type("Stated", (Act,), contract)(act)])


def drop_node(ir: IR) -> IR:
    """Return the IR without its last dropout."""
    with ir.edited() as edit:
        last = [n for n in edit.graph.nodes if n.op == "call_module"][-1]
        last.replace_all_uses_with(last.args[0])
    return edit.ir


def test_kept_contracts_pass() -> None:
    run(lambda ir: ir, needs=(fxsplit.Costs,), keeps=(fxsplit.Costs,), keeps_nodes=True, keeps_draws=True)
    run(lambda ir: ir.learn(replace(ir[fxsplit.Costs])), learns=(fxsplit.Costs,))


def test_a_need_is_checked_before_the_pass_runs() -> None:
    ran: list[int] = []

    def read(ir: IR) -> IR:
        ran.append(1)
        return ir

    read.needs = (States,)  # type: ignore[attr-defined]
    with pytest.raises(MissingFact, match=r"no States yet.*\('read' needs it, .*test_contract\.py:\d+\)"):
        fxsplit.run(make_ir(), [read])
    assert not ran


@pytest.mark.parametrize(
    ("act", "contract", "error"),
    [
        (lambda ir: ir, {"learns": (fxsplit.Costs,)}, "says that it learns Costs, and has not"),
        (
            lambda ir: ir.learn(replace(ir[fxsplit.Costs])),
            {"keeps": (fxsplit.Costs,)},
            "says that it keeps Costs, and has changed it",
        ),
        (drop_node, {"keeps_nodes": True}, "says that it keeps the nodes of the graph, and '_3' is 'output' now"),
        (
            drop_node,
            {"keeps_draws": True},
            "keeps the order of the nodes that draw random numbers, and '_3' is 'nothing'",
        ),
    ],
)
def test_a_broken_contract_names_the_pass(act: Any, contract: dict[str, Any], error: str) -> None:
    with pytest.raises(BrokenFact) as raised:
        run(act, **contract)
    assert str(raised.value).startswith("after pass 'act': the pass says that it ") and error in str(raised.value)


def test_the_passes_of_the_chain_state_what_they_need() -> None:
    for name in ("augment", "order", "partition", "emit"):
        with pytest.raises(MissingFact, match=f"'{name}' needs it"):
            fxsplit.run(fxsplit.capture(nn.Linear(4, 2), torch.ones(4, 4)), name)
