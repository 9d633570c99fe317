"""Lowering: the facts that the chain starts from, its results, and how a model is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.api.compiler import lowering
from fxsplit.api.compiler.compiler import get_mode
from fxsplit.api.compiler.lowering import (
    build_program,
    capture_model,
    find_rewritten,
    list_facts,
    list_joined,
    lower,
    pin_weights,
)
from fxsplit.api.compiler.options import Candidate, CompileOptions
from fxsplit.errors import NoFit, TraceError
from fxsplit.frontend.capture import capture
from fxsplit.ir.chain import parse_chain
from fxsplit.ir.facts.capture.call import Call
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.output_kinds import ROWS
from fxsplit.ir.facts.costs.known import KnownCosts
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.passes import PASSES
from fxsplit.runtime.stage.recompute import Policy
from fxsplit.schedule.generators.catalogue import Scheduler
from tests.support.models import FAST, Mlp

X = Call((torch.randn(8, 8),), {})


def make(chain: str = FAST, **options: Any) -> CompileOptions:
    return CompileOptions(machine=Machine.of(["cpu"] * 2), chain=parse_chain(chain, PASSES), **options)


def test_a_captured_model_becomes_stages_and_a_program() -> None:
    model, options, candidate = Mlp(), make(), Candidate(Scheduler("1F1B", 2), 4)
    captured = capture_model(model, options, X, 2, from_shapes=False)
    assert captured[Example].rows == 2
    final, costs = lower(options, captured, candidate, None)
    assert costs is not None and costs.rows == 2
    assert final[Plan].n_microbatches == 4
    program = build_program(model, options, candidate, captured, final)
    assert program.joined == (ROWS,) == list_joined(captured, program.stages)
    assert not program.writes_inputs and program.returns is None and program.recompute == "plan"
    with torch.no_grad():
        values: Any = X.args
        for stage in program.stages.stages:
            values = stage(*values)
        assert torch.equal(program.build_result(values), model(*X.args))


def test_facts_describe_machine_schedule_and_known_costs() -> None:
    options = make()
    captured = capture_model(Mlp(), options, X, 2, from_shapes=False)
    _, costs = lower(options, captured, Candidate(Scheduler("1F1B", 2), 4), None)
    facts = {type(f): f for f in list_facts(options, captured, Candidate(Scheduler("1F1B", 2), 4), costs, [])}
    workload: Any = facts[Workload]
    assert workload.in_flight == {1: (1,), 2: (2, 1)} and not workload.may_idle and workload.versions == {}
    known: Any = facts[KnownCosts]
    assert known.costs is costs and not known.complete, "measured by a search: other operators may be measured too"
    stated = make(costs=costs)
    facts = {type(f): f for f in list_facts(stated, captured, Candidate(Scheduler("1F1B", 2), 4), costs, [])}
    known = facts[KnownCosts]
    assert known.complete, "stated by the user: a model with other operators is another model"
    facts = {type(f): f for f in list_facts(options, captured, Candidate(Scheduler("PipeDream", 2), 4), None, [])}
    asynchronous: Any = facts[Workload]
    assert asynchronous.versions == {1: (1,), 2: (2, 1)} and KnownCosts not in facts
    looped: Any = list_facts(options, captured, Candidate(Scheduler("Interleaved1F1B", 2), 4), None, [])[0]
    assert len(looped) == 4, "each device has two places for stages"


def test_weights_are_pinned_to_the_stage_that_alone_has_them() -> None:
    model, options = Mlp(), make()
    captured = capture_model(model, options, X, 2, from_shapes=False)
    candidate = Candidate(Scheduler("1F1B", 2), 4)
    final, _ = lower(options, captured, candidate, None)
    program = build_program(model, options, candidate, captured, final)
    pins, stages = pin_weights(captured, [program]), program.stages
    owner = {str(n.target): s.index for s in stages.stages for n in s.module.graph.nodes if n.op == "call_module"}
    named = {n.name: str(n.target) for n in captured.gm.graph.nodes if n.op == "call_module"}
    assert {named[name]: stage for name, stage in pins.stages.items()} == owner and pins.optional == set(pins.stages)


def test_shapes_alone_are_tried_first_and_values_where_they_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []

    def noting(*args: Any, from_shapes: bool = False, **options: Any) -> Any:
        tried.append(from_shapes)
        if from_shapes:
            raise TraceError("a value decides")
        return capture(*args)

    monkeypatch.setattr(lowering, "capture", noting)
    capture_model(Mlp(), make(), X, 2, from_shapes=True)
    assert tried == [True, False]
    with pytest.raises(TraceError, match="a value decides"):
        capture_model(Mlp().to("meta"), make(), X, 2, from_shapes=True)


def test_whole_submodules_are_told_to_the_front_end() -> None:
    captured = capture_model(nn.Sequential(Mlp(), nn.Tanh()), make(f"leaf{{path=0}},{FAST}"), X, 2, from_shapes=False)
    assert [str(n.target) for n in captured.gm.graph.nodes if n.op == "call_module"] == ["0", "1"]


class Shared(nn.Module):
    """One buffer under two paths; the stages know only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.again = self.a

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.again(x)))
        return result


def test_rewritten_buffers_are_named_as_the_stages_name_them() -> None:
    model = Shared()
    with fxsplit.compile(model, 2, example_inputs=X.args, passes=FAST) as pipe:
        found = find_rewritten(model, pipe.stages, ["a.running_mean"])
        assert [pipe.stages[s].module.get_buffer(path) is model.a.running_mean for s, path in found] == [True]
        assert find_rewritten(model, pipe.stages, []) == ()


def test_the_mode_is_the_models() -> None:
    assert get_mode(Mlp()) == "train" and get_mode(Mlp().eval()) == "eval"


def test_a_plan_counts_the_recomputation_that_compile_states() -> None:
    """A plan must count recomputation: a model may fit only with it."""
    x, plans = torch.randn(64, 8), {}
    for recompute in ("plan", "never", "except_last", "always"):
        options: dict[str, Any] = {"schedule": "GPipe", "n_microbatches": 4, "passes": FAST}
        with fxsplit.compile(Mlp(), ["cpu"], example_inputs=x, recompute=recompute, **options) as pipe:
            (plans[recompute],) = pipe.plan.stages
    assert [stage.recompute for stage in plans.values()] == [False, False, False, True]
    assert plans["always"].memory_bytes < plans["plan"].memory_bytes == plans["except_last"].memory_bytes
    options["passes"] = FAST.replace("partition", "partition{recompute=always}")
    with fxsplit.compile(Mlp(), ["cpu"], example_inputs=x, recompute="never", **options) as pipe:
        assert not pipe.plan.stages[0].recompute


def test_a_misfit_names_recomputation_unless_stages_recompute_already() -> None:
    machine = Machine.of(["cpu"], memory_bytes=1e3)
    ways: list[tuple[Policy, bool]] = [("plan", True), ("always", False)]
    for recompute, named in ways:
        with pytest.raises(NoFit) as caught:
            fxsplit.compile(Mlp(), machine, example_inputs=torch.randn(64, 8), recompute=recompute, passes=FAST)
        assert ("partition{recompute=auto}" in str(caught.value)) == named
