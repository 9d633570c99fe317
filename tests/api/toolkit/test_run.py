"""capture, run and the IRs on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import ChainError, InputError, MissingFact
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.graph import IR, GivenFact
from tests.support.models import Residual

PLAN = "profile{repeats=1},augment,order,partition"


@dataclass(frozen=True)
class Count(fxsplit.Fact):
    """The number of nodes of the graph."""

    nodes: int
    made_by: ClassVar[str] = "count"

    def verify(self, ir: IR) -> None:
        """Accept every graph."""


def count(ir: IR) -> IR:
    """Learn how many nodes the graph has."""
    return ir.learn(Count(len(ir.gm.graph.nodes)))


def test_a_model_is_captured_planned_and_cut_by_hand() -> None:
    model, x = Residual(), torch.randn(8, 3, 8, 8)
    ir = fxsplit.capture(model, x, devices=2, n_microbatches=4)
    assert ir.model == "Residual" and ir[fxsplit.Machine].summarise().startswith("2 devices")
    planned = fxsplit.run(ir, PLAN)
    final = fxsplit.run(planned, "emit")
    values = (x[:2],)
    for stage in final[fxsplit.Stages].stages:
        values = stage(*values)
    expected = model(x[:2])
    torch.testing.assert_close(final[fxsplit.Stages].fill(values), expected, rtol=0, atol=0)
    # The facts that emit forgets can still be read.
    assert final.before("emit")[fxsplit.Costs] is planned[fxsplit.Costs] and len(final.after("order")[States]) > 2
    with pytest.raises(MissingFact, match="no Plan yet"):
        final.before("partition")[fxsplit.Plan]
    with pytest.raises(
        ChainError, match="the IR around pass 'cut' is not known: the steps are profile, augment, order"
    ):
        final.before("cut")


def test_a_pipeline_keeps_the_facts_that_emit_forgets() -> None:
    chain = fxsplit.DEFAULT.after("profile", count)
    with fxsplit.compile(Residual(), 2, example_inputs=torch.randn(8, 3, 8, 8), passes=chain) as pipe:
        assert pipe.ir.before("emit")[Count].nodes == len(pipe.ir.after("count").gm.graph.nodes)
        assert pipe.ir.get(Count) is None and pipe.ir.before("partition").get(States) is None


def test_until_and_observers() -> None:
    seen = []

    class Watch(fxsplit.Observer):
        def before(self, name: str, ir: IR) -> None:
            seen.append(f"before {name}")

        def after(self, name: str, ir: IR) -> None:
            seen.append(f"after {name}")

    ir = fxsplit.capture(Residual(), torch.randn(8, 3, 8, 8))
    found = fxsplit.run(ir, PLAN, until="augment", observers=[Watch()])
    assert seen == ["before profile", "after profile", "before augment", "after augment"]
    assert [step.text for step in found.steps] == ["profile{repeats=1}", "augment"]
    with pytest.raises(ChainError, match="no pass 'emit' in this chain"):
        fxsplit.run(ir, PLAN, until="emit")


def test_nothing_is_verified_if_nothing_shall_be() -> None:
    @dataclass(frozen=True)
    class Wrong(GivenFact):
        made_by: ClassVar[str] = "lie"

        def verify(self, ir: IR) -> None:
            raise fxsplit.FxsplitError("never true")

    def lie(ir: IR) -> IR:
        return ir.learn(Wrong())

    ir = fxsplit.capture(Residual(), torch.randn(8, 3, 8, 8))
    assert fxsplit.run(ir, [lie], verify=False)[Wrong] == Wrong()
    with pytest.raises(fxsplit.FxsplitError, match="never true"):
        fxsplit.run(ir, [lie])


def test_passes_run_backward_whatever_the_grad_mode_is() -> None:
    ir = fxsplit.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(8, 4))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            costs = fxsplit.run(ir, "profile{repeats=1}")[fxsplit.Costs]
        assert all(node.backward_ms > 0 for node in costs.nodes)


def test_a_capture_is_for_two_devices_and_a_number_of_microbatches() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    ir = fxsplit.capture(model, x)
    assert len(ir[fxsplit.Machine]) == 2 and ir[Workload].n_microbatches == 2
    assert ir[Example].rows == 4 and fxsplit.capture(model, x, n_microbatches=1)[Example].rows == 8
    for odd in (0, -1, 1.5):
        with pytest.raises(InputError, match="n_microbatches"):
            fxsplit.capture(model, x, n_microbatches=odd)  # type: ignore[arg-type]
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    assert fxsplit.capture(nested, x, leaves=["0"])[Example].leaves == ("0",)
