"""plan() on a profile, and the passes of compile() on a graph, give the same plan."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxsplit
from fxsplit.api.plan import lay_out
from fxsplit.errors import FxsplitWarning, InputError, PlanError, ScheduleError, TooFewParts
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import run_chain
from fxsplit.passes import Augment, Order, Partition
from fxsplit.passes.schedule import SchedulePlan
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.schedule import SCHEDULES
from fxsplit.schedule.generators.catalogue import ScheduleName, Scheduler
from fxsplit.schedule.generators.synchronous import REPLICABLE
from fxsplit.schedule.of_plan import build_schedule, read_times
from fxsplit.schedule.schedule_plan import schedule_plan
from fxsplit.schedule.simulation.simulate import simulate
from tests.support.graphs import ir_of, machines, node, profiles
from tests.support.models import FAST, Residual

few = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def describe(plan: Plan | str) -> object:
    """The whole plan as a text, with the number of states searched."""
    if isinstance(plan, str):
        return plan
    return plan.stages, plan.device_names, plan.lower_bound_ms, plan.n_states, plan.schedule, plan.n_microbatches


def plan_profile(
    costs: Costs, machine: Machine, schedule: ScheduleName, options: Options, pins: dict[str, int]
) -> Plan | str:
    try:
        try:
            return fxsplit.plan(costs, machine, schedule=schedule, options=options, pins=pins)
        except TooFewParts:
            # A pipeline then has stages that only pass values on, and plan() leaves the choice to its caller.
            unrolled, work = lay_out(machine, schedule)
            work = replace(work, may_idle=True)
            return schedule_plan(Planner(costs, pins).plan(unrolled, work, options), costs, unrolled, work)[0]
    except PlanError as error:
        return str(error)


def run_passes(
    costs: Costs, machine: Machine, schedule: str, options: Options, pins: dict[str, int], late: bool
) -> Plan | str:
    """The plan of the passes that compile() runs; `late` pins after augment, after nodes have been joined."""
    ir = ir_of(costs, *lay_out(machine, schedule))
    fields = {name: getattr(options, name) for name in options.__dataclass_fields__}

    def pin(ir: IR) -> IR:
        return Pins.add(ir, pins) if pins else ir

    chain: list[Any] = [Augment(free=options.free), Order(), Partition(**fields), SchedulePlan()]
    chain.insert(2 if late else 0, pin)
    try:
        with warnings.catch_warnings(action="ignore", category=FxsplitWarning):
            return run_chain(ir, chain)[Plan]
    except PlanError as error:
        return str(error)


@st.composite
def mostly_light(draw: st.DrawFn) -> Costs:
    """Profiles in which some nodes cost nothing, so that they join neighbours."""
    costs = draw(profiles(6))
    nothing = {"forward_ms": 0.0, "backward_ms": 0.0, "host_ms": 0.0, "parameter_bytes": 0}
    nothing |= {"buffer_bytes": 0, "kept_bytes": 0}
    light = [draw(st.booleans()) for _ in costs.nodes]
    nodes = (replace(n, **nothing) if b else n for n, b in zip(costs.nodes, light, strict=True))  # type: ignore[arg-type]
    return replace(costs, nodes=tuple(nodes))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_passes_give_the_plan_of_a_profile(schedule: ScheduleName) -> None:
    """For equal costs, over networks, machines, memory, cost models and pins."""
    joined = several_stages = 0

    @few
    @given(mostly_light(), st.data())
    def check(costs: Costs, data: st.DataObject) -> None:
        nonlocal joined, several_stages
        memory = data.draw(st.sampled_from([inf, inf, 3e4, 3e3]))
        alike = Machine.planned(data.draw(st.sampled_from([2, 4] if schedule == "Chimera" else [1, 2, 3])), 1e5, memory)
        machine = alike if schedule == "Chimera" or data.draw(st.booleans()) else data.draw(machines(3))
        # Other schedules run no stages with several devices, and plan() refuses such a plan.
        several = ["replicated"] * (schedule in REPLICABLE)
        free = len(set(machine.links)) <= 1 and data.draw(st.integers(0, 4)) == 0
        model = data.draw(st.sampled_from(["forwarded", "overlapped", "direct", *several[free:]]))
        recompute = data.draw(st.sampled_from(["never", "never", "auto"]))
        options = Options(use_all=data.draw(st.booleans()), model=model, free=free, recompute=recompute)
        pinned = data.draw(st.lists(st.sampled_from([n.name for n in costs.nodes]), max_size=1))
        pins = {name: data.draw(st.integers(0, len(machine) - 1)) for name in pinned}
        try:
            several_stages += bool(lay_out(machine, schedule)[0].homes)
        except ScheduleError:
            return
        expected = plan_profile(costs, machine, schedule, options, pins)
        found = run_passes(costs, machine, schedule, options, pins, late=False)
        assert describe(found) == describe(expected)
        late = run_passes(costs, machine, schedule, options, pins, late=True)
        assert isinstance(late, str) == isinstance(expected, str)
        if isinstance(late, Plan) and isinstance(expected, Plan):
            assert late.bottleneck_ms == pytest.approx(expected.bottleneck_ms, rel=1e-9)
        joined += isinstance(expected, Plan) and expected.n_states < len(Planner(costs).lattice(machine, whole=True)[0])

    check()
    # If a device has several stages, all stages need nodes, and few nodes of these small networks can join others.
    assert joined or several_stages, "no profile had nodes to join"


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "PipeDream-2BW"])
def test_plan_takes_the_costs_of_every_schedule_that_compile_runs(schedule: ScheduleName) -> None:
    """plan() must not refuse a schedule that compile() runs."""
    torch.manual_seed(0)
    with fxsplit.compile(
        Residual(), 2, example_inputs=torch.randn(8, 3, 8, 8), schedule=schedule, n_microbatches=4, passes=FAST
    ) as pipe:
        planned = fxsplit.plan(pipe.costs, Machine.of(2), schedule=schedule, n_microbatches=4)
        assert describe(planned) == describe(pipe.plan)


def test_late_pins_part_what_costs_nothing() -> None:
    """A pass between augment and partition may pin a node that has joined a neighbour."""
    costs = Costs((node("a"), node("free", ["a"], 0.0), node("b", ["free"])), (), ("b",), rows=1)
    machine = Machine.planned(2)
    for device, stages in ((0, [2, 1]), (1, [1, 2])):
        plan = run_passes(costs, machine, "1F1B", Options(), {"free": device}, late=True)
        assert isinstance(plan, Plan) and [len(s.nodes) for s in plan.stages] == stages


def test_numbers_that_a_schedule_is_not_made_for_are_refused() -> None:
    costs = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(8)), (), ("n7",), rows=1)
    with pytest.raises(ScheduleError, match="3 devices do not divide into two directions"):
        fxsplit.plan(costs, 3, schedule="Chimera")
    with pytest.raises(ScheduleError, match="9 microbatches do not divide into rounds"):
        fxsplit.plan(costs, 4, schedule="Interleaved1F1B", n_microbatches=9)
    with pytest.raises(InputError, match="give a number of at least 1"):
        fxsplit.plan(costs, 2, n_microbatches=0)
    plan = fxsplit.plan(costs, 2, schedule="Interleaved1F1B")
    assert plan.device_names == ("device0/0", "device1/0", "device0/1", "device1/1") and plan.bottleneck_ms == 6.0


def test_the_best_plan_chooses_stages_replicas_devices_and_order_together() -> None:
    """Two devices share the microbatches of everything, in a third there is no use."""
    nodes = (node("a", ms=4.0, parameter_bytes=10), node("b", ["a"], 4.0), node("c", ["b"], 4.0))
    costs = Costs(nodes, (), ("c",), rows=1)
    best = fxsplit.plan(costs, 3, n_microbatches=2, best=True)
    assert [stage.devices for stage in best.stages] == [(0, 1)] and best.schedule == "search"
    assert best.step_ms == pytest.approx(36.0) and best.optimal and best.model.name == "replicated"
    # A value that is stated stays: no replicas, or an order by name.
    line = fxsplit.plan(costs, 3, n_microbatches=2, best=True, options=Options(use_all=False))
    assert all(len(stage.devices) == 1 for stage in line.stages) and line.model.name == "forwarded"
    named = fxsplit.plan(costs, 3, n_microbatches=2, best=True, schedule="GPipe")
    assert named.schedule == "GPipe" and not named.schedule_csv
    assert min(line.step_ms or 0.0, named.step_ms or 0.0) >= 36.0


def test_several_profiles_give_the_number_of_microbatches_too(tmp_path: Path) -> None:
    """A row takes 1 ms in each node, and each microbatch half of one more."""

    def at(rows: int) -> Costs:
        nodes = (node("a", ms=0.5 + rows, parameter_bytes=10**9), node("b", ["a"], 0.5 + rows, parameter_bytes=10**9))
        return Costs(nodes, (), ("b",), rows=rows)

    machine = fxsplit.Machine.planned(2, 1e9)
    at(8).save(tmp_path / "8.json")
    plan = fxsplit.plan([tmp_path / "8.json", at(1)], machine, n_microbatches=2, best=True)
    assert (plan.n_microbatches * plan.rows, plan.interpolated_between) == (16, (1, 8)) and plan.rows == 4
    alone = [fxsplit.plan(at(rows), machine, n_microbatches=16 // rows, best=True) for rows in (1, 2, 4, 8)]
    assert plan.step_ms == min(each.step_ms or 0.0 for each in alone)
    assert plan.step_lower_bound_ms == min(each.step_lower_bound_ms or 0.0 for each in alone)
    assert plan.costs is not None and plan.costs.rows == 4
    with pytest.raises(InputError, match="give n_microbatches= too"):
        fxsplit.plan([at(8), at(1)], machine, best=True)
    with pytest.raises(InputError, match="give best=True too"):
        fxsplit.plan([at(8), at(1)], machine, n_microbatches=2)
    with pytest.raises(fxsplit.FxsplitError, match=r"'profile 1' is not a profile of the model in '.*8\.json'"):
        fxsplit.plan([tmp_path / "8.json", replace(at(1), outputs=("a",))], machine, n_microbatches=2, best=True)


def test_an_objective_alone_keeps_schedule_and_cost_model() -> None:
    costs = Costs((node("a", ms=4.0), node("b", ["a"], 4.0), node("c", ["b"], 4.0)), (), ("c",), rows=1)
    plan = fxsplit.plan(costs, 3, n_microbatches=2, objective="step")
    assert (plan.schedule, plan.model.name, plan.minimised) == ("1F1B", "forwarded", "step")
    assert plan == plan and fxsplit.plan(costs, 3, objective="bottleneck").minimised == "bottleneck"
    # In Options too, and the argument goes first.
    options = Options(use_all=False, objective="step")
    assert fxsplit.plan(costs, 3, options=options).minimised == "step"
    assert fxsplit.plan(costs, 3, options=options, objective="bottleneck").minimised == "bottleneck"


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZBVZeroBubble", "Interleaved1F1B", "search", "Chimera"])
def test_every_plan_that_can_run_states_the_step_of_the_simulator(schedule: ScheduleName) -> None:
    costs = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(8)), (), ("n7",), rows=1)
    plan = fxsplit.plan(costs, 2, schedule=schedule, n_microbatches=4)
    made = build_schedule(plan, Scheduler(schedule, 2), 4)
    assert plan.step_ms == simulate(made, read_times(plan, made)).step_ms
    # Nobody can run a plan that sends values straight to their readers, or one in another order of devices.
    assert fxsplit.plan(costs, 2, options=Options(model="direct")).step_ms is None


def test_replicas_under_a_schedule_that_runs_none_are_refused() -> None:
    """plan() must not return a plan that compile() refuses."""
    costs = Costs((node("a", ms=9.0),), (), ("a",))
    options = Options(use_all=False, model="replicated")
    assert fxsplit.plan(costs, 2, options=options).stages[0].devices == (0, 1)
    with pytest.raises(ScheduleError, match="ZBVZeroBubble: the plan gives a stage several devices, which run under"):
        fxsplit.plan(costs, 2, schedule="ZBVZeroBubble", options=options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"machine": ["cpu", "cpu"]},
            r"machine=\['cpu', 'cpu'\]: give a number .*Machine.of\(\['cpu', 'cpu'\]\)",
        ),
        ({"machine": 2.0}, "machine=2.0: give a number of devices"),
        ({"options": {"recompute": "auto"}}, r"options={'recompute': 'auto'}: give an Options of fxsplit.planner"),
        ({"inference": "yes"}, "inference='yes': give True or False"),
        (
            {"inference": True, "options": Options(recompute="auto")},
            "recompute=auto}: inference has no backwards, so leave it out",
        ),
        (
            {"inference": True, "options": Options(optimizer_factor=0.0)},
            "optimizer_factor=0}: inference has no optimizer, so leave it out",
        ),
        ({"pins": ["b"]}, r"pins=\['b'\]: give the number of a stage"),
        ({"pins": {"b": "1"}}, "pins={'b': '1'}: give the name of a submodule or node, and a number"),
        ({"pins": {"b": True}}, "pins={'b': True}: give"),
        ({"pins": {1: 1}}, "pins={1: 1}: give"),
        (
            {"together": None},
            r"together=None: give a list of sets of names that stay together, such as \[\('a', 'b'\)\]",
        ),
        ({"together": [["a", 2]]}, r"together has \['a', 2\]: give sets of names"),
        ({"best": 1}, "best=1: give True or False"),
        ({"objective": "steps"}, "objective='steps': give one of bottleneck, step"),
        ({"best": True, "inference": True}, "a step is one of training, so leave one of them out"),
        ({"best": True, "objective": "bottleneck"}, "the best plan is the one with the shortest step"),
    ],
)
def test_an_argument_of_another_type_or_without_effect_is_named(arguments: dict[str, Any], message: str) -> None:
    """Each of these was an error of Python from deep inside, was taken for something else, or was ignored."""
    costs = Costs((node("a"), node("b", ["a"])), (), ("b",), rows=1)
    call: Any = fxsplit.plan
    with pytest.raises(InputError, match=message):
        call(costs, **{"machine": 2, **arguments})
    with pytest.raises(ScheduleError, match=r"schedule=\['1F1B'\]: give a name, 'auto', a Schedule"):
        call(costs, 2, schedule=["1F1B"])


def test_a_pipeline_that_is_not_compiled_has_no_costs_to_plan_from() -> None:
    pipe = fxsplit.compile(Residual(), 2, passes=FAST)
    with pytest.raises(InputError, match="nothing is compiled yet: call the pipeline once"):
        fxsplit.plan(pipe, 2)


@pytest.mark.parametrize("options", [None, Options(use_all=False)])
def test_compile_runs_the_best_plan_with_its_replicas_and_its_order(options: Options | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(5)))
    x, y = torch.randn(12, 6), torch.randn(12, 6)
    machine = Machine.of(["cpu"] * 3, bytes_per_s=1e9)
    costs = fxsplit.profile(model, x, n_microbatches=6, device="cpu")
    best = fxsplit.plan(costs, machine, n_microbatches=6, best=True, options=options)
    loss_fn = torch.nn.MSELoss()
    with fxsplit.compile(
        model, machine, example_inputs=x, plan=best, schedule="search", n_microbatches=6, costs=costs, loss_fn=loss_fn
    ) as pipe:
        assert pipe.plan.step_ms == best.step_ms and pipe.plan.standing == best.standing
        assert pipe.plan.schedule_csv == best.schedule_csv
        loss = pipe.step(x, target=y)
        found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    whole = loss_fn(model(x), y)
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    for mine, own in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, own.grad)
