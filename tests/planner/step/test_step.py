"""The plan with the shortest step beside every plan of small graphs, and what it says of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.api.toolkit.parse_ir import parse_ir
from fxsplit.errors import FxsplitError, NoFit, PlanError
from fxsplit.formats.plan_json import parse_plan, plan_to_dict
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.ir.facts.memory.moments import count_moving
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.text.write import render
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.planner.step import prices, step
from fxsplit.planner.step.prices import price_ideals
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.moments import list_moments
from fxsplit.schedule.of_plan import build_schedule, read_times, restore_schedule
from fxsplit.schedule.schedule_plan import schedule_plan
from fxsplit.schedule.simulation.simulate import simulate
from fxsplit.schedule.verify import verify
from tests.planner.step.test_bound import machines
from tests.support.graphs import ir_of, node, profiles, sweep, try_examples
from tests.support.steps import find_best_that_fits, find_shortest, find_shortest_chain

STEP = Options(model="replicated", use_all=False, objective="step")
LINE = replace(STEP, model="forwarded")


def solve(costs: Costs, machine: Machine, m: int, options: Options = STEP, schedule: str = SEARCH) -> Plan:
    laid_out, workload = Scheduler(schedule, len(machine)).lay_out(machine, m)
    return Planner(costs).plan(laid_out, workload, options)


def chain(*ms: float, **figures: float) -> Costs:
    """A chain of nodes that take so many ms forward."""
    nodes = tuple(node(f"n{i}", [f"n{i - 1}" if i else "x"], each, **figures) for i, each in enumerate(ms))
    return Costs(nodes, (InputCost("x", 0, 0),), (f"n{len(ms) - 1}",), rows=1)


@sweep(12, 300)
@pytest.mark.parametrize("options", [STEP, LINE])
def test_a_plan_is_as_good_as_every_plan_and_above_its_bound(options: Options, examples: int) -> None:
    @try_examples(examples)
    @given(profiles(4), machines(), st.integers(1, 3))
    def check(costs: Costs, machine: Machine, m: int) -> None:
        bare = tuple(replace(n, forward_launch_ms=0.0, backward_launch_ms=0.0) for n in costs.nodes)
        plan = solve(replace(costs, nodes=bare), machine, m, options)
        one, two = find_shortest(costs, machine, m, replicas=options is STEP), find_shortest_chain(costs, machine, m)
        orders, named = min(one.orders, two.orders), min(one.named, two.named)
        assert plan.step_ms is not None and plan.step_lower_bound_ms is not None
        assert plan.step_lower_bound_ms <= orders * (1 + 1e-9) + 1e-9
        # Orders of work are searched: on graphs of this size the best is found but for rare cases.
        assert plan.step_ms <= named * (1 + 1e-9) + 1e-9
        assert plan.step_ms <= orders * 1.05 + 1e-9
        # A chain may have stages without any cost, which the referee leaves out.
        if one.complete and two.complete and all(n.forward_ms or n.backward_ms for n in costs.nodes):
            assert plan.step_ms >= orders * (1 - 1e-9) - 1e-9

    check()


@sweep(25, 500)
def test_a_plan_states_its_schedule_and_the_step_of_the_simulator(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(6), machines(4), st.integers(1, 5), st.sampled_from([SEARCH, "1F1B", "GPipe", "ZB-H1"]))
    def check(costs: Costs, machine: Machine, m: int, schedule: str) -> None:
        plan = solve(costs, machine, m, STEP, schedule)
        laid_out, workload = Scheduler(schedule, len(machine)).lay_out(machine, m)
        made = build_schedule(plan, Scheduler(schedule, len(machine)), m)
        verify(made)
        assert simulate(made, read_times(plan, made)).step_ms == plan.step_ms
        assert plan.minimised == "step" and plan.schedule == schedule
        # Written as JSON and read again, with the schedule that compile() would run.
        again = parse_plan(json.loads(json.dumps(plan_to_dict(plan))), "a plan")
        # A plan from a file does not know its costs, nor its machine unless that is stated.
        other = {"proof": None, "costs": None, "machine": None, "lower_bound_ms": again.lower_bound_ms}
        assert vars(again) | {"proof": None} == vars(plan) | other
        taken, load, _ = schedule_plan(again, costs, laid_out, workload)
        assert (taken.stages, taken.step_ms, taken.step_gap) == (plan.stages, plan.step_ms, plan.step_gap)
        # And as text.
        ir = ir_of(costs, taken.machine or laid_out, load, taken)
        taken.verify(ir)
        read = parse_ir(render(ir), "a plan")[Plan]
        assert (read.step_ms, read.step_lower_bound_ms) == (plan.step_ms, plan.step_lower_bound_ms)
        assert read.standing == plan.standing

    check()


def test_microbatches_without_a_pipeline_have_nothing_to_wait_for() -> None:
    plan = solve(chain(1.0, 1.0, 1.0, 1.0), Machine.planned(4), 8)
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3)]
    assert plan.step_ms == pytest.approx(2 * 12.0) and plan.optimal and plan.standing == "optimal"


def test_heavy_weights_keep_their_device_while_the_rest_has_replicas() -> None:
    """Summing the gradients of the last node takes longer than its work."""
    nodes = (*chain(4.0, 4.0, 4.0).nodes, node("n3", ["n2"], 1.0, parameter_bytes=10**9))
    costs = Costs(nodes, (InputCost("x", 0, 0),), ("n3",), rows=1)
    plan = solve(costs, Machine.planned(4, 1e9), 9)
    assert [len(stage.devices) for stage in plan.stages] == [3, 1]
    assert plan.stages[-1].nodes == ("n3",)


def test_one_device_is_best_if_links_are_slow() -> None:
    plan = solve(chain(1.0, 1.0, output_bytes=10**6, parameter_bytes=10**7), Machine.planned(2, 1e6), 4)
    assert len(plan.stages) == 1 and len(plan.stages[0].devices) == 1
    assert plan.step_ms == pytest.approx(24.0) and plan.optimal


def test_a_plan_says_what_was_minimised() -> None:
    plan = solve(chain(1.0, 2.0, 3.0), Machine.planned(2), 4, LINE)
    data = plan_to_dict(plan)
    assert data["minimised"] == "step" and data["objective"] == data["bottleneck_ms"] == plan.bottleneck_ms
    assert (data["lower_bound"], data["gap"]) == (None, None)
    assert data["step_ms"] == plan.step_ms and data["step_gap"] == plan.step_gap
    assert data["step_lower_bound_ms"] <= data["step_ms"]
    assert f"step {plan.step_ms:.3f} ms" in str(plan) and f"step {plan.step_ms:.3f} ms" in repr(plan)
    assert "bottleneck" not in str(plan)


REFUSED: list[tuple[dict[str, Any], Machine, str, str]] = [
    ({"model": "direct"}, Machine.planned(2), SEARCH, "cost model 'direct'"),
    ({"model": "overlapped"}, Machine.planned(2), SEARCH, "cost model 'overlapped'"),
    ({"use_all": True}, Machine.planned(2), SEARCH, "as many devices as help"),
    ({}, Machine((Device("a"), Device("b", speed=2.0)), (inf,)), SEARCH, "equal devices"),
    ({}, replace(Machine.planned(2), transfers="blocking"), SEARCH, "transfers='asynchronous'"),
    ({}, Machine.planned(2), "ZB-H2", "schedule 'ZB-H2'"),
]


@pytest.mark.parametrize(("options", "machine", "schedule", "message"), REFUSED)
def test_a_task_that_it_does_not_solve_is_refused(
    options: dict[str, Any], machine: Machine, schedule: str, message: str
) -> None:
    with pytest.raises(FxsplitError, match=message) as error:
        solve(chain(1.0, 2.0, 3.0), machine, 4, replace(STEP, **options), schedule)
    assert "objective='bottleneck'" in str(error.value)


@sweep(15, 300)
@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
@pytest.mark.parametrize("options", [STEP, LINE])
def test_plans_stay_in_memory_and_are_as_good_as_every_named_schedule_that_does(
    options: Options, recompute: str, examples: int
) -> None:
    options = replace(options, recompute=recompute)

    @try_examples(examples)
    @given(profiles(4), machines(), st.integers(1, 4), st.sampled_from([1e3, 3e3, 6e3, 1e4, 2e4]))
    def check(costs: Costs, machine: Machine, m: int, memory_bytes: float) -> None:
        bare = tuple(replace(n, forward_launch_ms=0.0, backward_launch_ms=0.0) for n in costs.nodes)
        costs = replace(costs, nodes=bare)
        machine = replace(machine, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in machine.devices))
        replicas = options.model == "replicated"
        best = find_best_that_fits(costs, machine, m, replicas=replicas, recompute=recompute)
        try:
            plan = solve(costs, machine, m, options)
        except NoFit as error:
            assert best is None, error
            return
        laid_out, workload = Scheduler(SEARCH, len(machine)).lay_out(machine, m)
        taken, load, _ = schedule_plan(plan, costs, laid_out, workload)
        taken.verify(ir_of(costs, taken.machine or laid_out, load, taken))
        assert all(stage.memory_bytes <= memory_bytes for stage in taken.stages)
        assert plan.step_ms is not None and plan.step_lower_bound_ms is not None
        assert plan.step_lower_bound_ms <= plan.step_ms
        if best is not None:
            assert plan.step_lower_bound_ms <= best * (1 + 1e-9) + 1e-9
            assert plan.step_ms <= best * (1 + 1e-9) + 1e-9

    check()


def test_a_stage_that_recomputes_returns_its_input_gradient_before_its_weight_gradient() -> None:
    """F of the first node, I of the second (0.5 ms), and the first one's forward again, while W of the second runs."""
    nodes = (node("a", ["x"], 1.0, backward_ms=0.0), node("b", ["a"], 0.0, backward_ms=1.0, weight_ms=0.5))
    costs = Costs(nodes, (InputCost("x", 0, 0),), ("b",), rows=1)
    for options in (STEP, LINE):
        plan = solve(costs, Machine.planned(2, memory_bytes=6e3), 1, replace(options, recompute="always"))
        assert plan.step_ms == pytest.approx(2.5) and plan.step_gap == pytest.approx(0.0, abs=1e-3)
        assert all(s.recompute for s in plan.stages) and "I0" in plan.schedule_csv


def test_replicas_without_a_microbatch_are_left_out() -> None:
    """Two microbatches: the plan with the smallest bottleneck has four replicas of one stage."""
    plan = solve(chain(3.0, 3.0), Machine.planned(4, 1e12, memory_bytes=1e9), 2)
    assert max(len(stage.devices) for stage in plan.stages) <= 2
    assert restore_schedule(plan).n_microbatches == 2


def test_a_graph_that_no_device_holds_is_refused_with_a_proof() -> None:
    """The middle node holds four copies of its weights."""
    nodes = (node("a", ["x"]), node("b", ["a"], parameter_bytes=10**6), node("c", ["b"]))
    costs = Costs(nodes, (InputCost("x", 0, 0),), ("c",), rows=1)
    with pytest.raises(NoFit, match="no plan fits in memory, in any order of work: use more devices"):
        solve(costs, Machine.planned(3, memory_bytes=3e6), 4)
    assert solve(costs, Machine.planned(3, memory_bytes=4.1e6), 4).stages


def test_ample_memory_changes_no_plan() -> None:
    costs = chain(3.0, 1.0, 2.0, 4.0)
    free = solve(costs, Machine.planned(3, 1e12), 4)
    ample = solve(costs, Machine.planned(3, 1e12, memory_bytes=1e12), 4)
    assert ample.stages == free.stages
    assert (ample.step_ms, ample.step_lower_bound_ms, ample.proof) == (
        free.step_ms,
        free.step_lower_bound_ms,
        free.proof,
    )


def test_replicas_under_a_named_schedule_stay_in_memory() -> None:
    """The second stage holds another microbatch if the first one has two replicas: 11,008 bytes, and not 10,624."""
    layers = [("n0", "n1"), ("n2", "n3"), ("n4", "n5"), ("n6", "n7")]
    figures: dict[str, Any] = {"output_bytes": 192, "gradient_bytes": 192, "storage_bytes": 192}
    nodes, before = list[NodeCost](), "x"
    for i, (linear, tanh) in enumerate(layers):
        ms, size = (11.0, 512) if i == 0 else (1.0, 576)
        weights = {"parameter_bytes": size, "handed_bytes": size, "unkept_bytes": 192, "forward_peak_bytes": 192}
        peak = 192 * (i > 0) + size
        weights |= {"backward_peak_bytes": peak, "halved_peak_bytes": peak}
        nodes.append(node(linear, [before], ms, backward_ms=2 * ms, kept_bytes=0, **weights, **figures))
        peaks = dict.fromkeys(("forward_peak_bytes", "backward_peak_bytes", "halved_peak_bytes"), 192)
        nodes.append(node(tanh, [linear], 1.0, backward_ms=2.0, kept_bytes=192, **peaks, **figures))
        before = tanh
    costs = Costs(tuple(nodes), (InputCost("x", 192, 0),), ("n7",), rows=3)
    for limit, devices in ((10_900, [(0,), (1,), (2,)]), (11_100, [(0, 1), (2,)])):
        plan = solve(costs, Machine.planned(3, memory_bytes=limit), 4, schedule="1F1B")
        assert [stage.devices for stage in plan.stages] == devices
        moments = list_moments(build_schedule(plan, Scheduler("1F1B", 3), 4, [limit] * 3))
        for stage, own in zip(plan.stages, moments, strict=True):
            assert stage.held_bytes + max(count_moving(stage, moment) for moment in own) <= limit


def test_memory_that_holds_only_parts_of_the_model_needs_a_pipeline() -> None:
    """Without limits all devices run everything: three nodes of 4 MB, and 5 MB for each device."""
    costs = chain(3.0, 3.0, 3.0, parameter_bytes=10**6)
    machine = Machine.planned(3, 1e12)
    assert [len(stage.devices) for stage in solve(costs, machine, 6).stages] == [3]
    plan = solve(costs, replace(machine, devices=tuple(replace(d, memory_bytes=5e6) for d in machine.devices)), 6)
    assert [stage.devices for stage in plan.stages] == [(0,), (1,), (2,)]
    # The bound knows that a stage has one node, so it is far above the work of all devices: 54 ms.
    assert plan.step_gap is not None and plan.step_gap < 0.02 and plan.step_ms == pytest.approx(60.0)


def test_stages_recompute_only_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = chain(3.0, 3.0, 3.0, parameter_bytes=10**6, kept_bytes=10**6)
    auto = replace(LINE, recompute="auto")
    assert not any(s.recompute for s in solve(costs, Machine.planned(3), 6, auto).stages)
    machine = Machine.planned(3, memory_bytes=5.2e6)
    plan, never = solve(costs, machine, 6, auto), solve(costs, machine, 6, LINE)
    # One microbatch at a time on each device, or several whose forwards run twice.
    assert any(s.recompute for s in plan.stages) and (plan.step_ms or 0.0) < (never.step_ms or 0.0)
    # ZB-H1 is as fast as the list schedule, in which these stages do their backward in one piece.
    monkeypatch.setattr(step, "SIMPLE", ())
    listed = solve(costs, machine, 6, auto)
    assert listed.step_ms == pytest.approx(plan.step_ms) and "B0" in listed.schedule_csv
    always = solve(costs, Machine.planned(3), 6, replace(LINE, recompute="always"))
    assert all(s.recompute for s in always.stages)


def test_a_line_that_does_not_fit_after_all_does_not_end_the_search() -> None:
    """Sums over ideals say that one device holds the whole model, and its largest node needs more while it runs."""
    known = dict.fromkeys(("forward_peak_bytes", "halved_peak_bytes", "late_peak_bytes"), 0.0)
    figures = {"parameter_bytes": 100, "kept_bytes": 100, **known, "backward_peak_bytes": 600.0}
    costs = chain(1.0, 1.0, **figures)
    machine = Machine.planned(2, memory_bytes=5_500.0)
    alone = solve(costs, Machine.planned(1), 4, LINE).stages[0].memory_bytes
    assert alone > machine.devices[0].memory_bytes
    prices_ = price_ideals(costs, Planner(costs).lattice(machine)[0], machine)
    assert prices_.held[-1] + prices_.kept[-1] < machine.devices[0].memory_bytes
    # Two replicas would meet the bound of the work.
    assert len(solve(costs, machine, 4).stages) == 2


def test_less_memory_means_fewer_microbatches_at_once() -> None:
    costs = chain(3.0, 3.0, 3.0, parameter_bytes=10**6, kept_bytes=10**6)
    steps = []
    for room in (1.0, 2.0, 3.0, 6.0):
        machine = Machine.planned(3, memory_bytes=4e6 + room * 1e6)
        plan = solve(costs, machine, 6)
        assert max(stage.memory_bytes for stage in plan.stages) <= machine.devices[0].memory_bytes
        steps.append(plan.step_ms or 0.0)
    assert steps == sorted(steps, reverse=True) and steps[0] > 1.2 * steps[-1]


def test_pins_are_refused() -> None:
    laid_out, workload = Scheduler(SEARCH, 2).lay_out(Machine.planned(2), 4)
    with pytest.raises(PlanError, match="takes no pins"):
        Planner(chain(1.0, 2.0), {"n0": 0}).plan(laid_out, workload, STEP)


@pytest.mark.parametrize("options", [STEP, LINE])
@sweep(8, 200)
def test_too_many_ideals_have_a_plan_and_a_bound_too(
    options: Options, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices, "MOST_IDEALS", 0)

    @try_examples(examples)
    @given(profiles(4), machines(), st.integers(1, 3))
    def check(costs: Costs, machine: Machine, m: int) -> None:
        bare = tuple(replace(n, forward_launch_ms=0.0, backward_launch_ms=0.0) for n in costs.nodes)
        plan = solve(replace(costs, nodes=bare), machine, m, options)
        best = find_shortest(costs, machine, m, replicas=options is STEP)
        assert plan.step_lower_bound_ms is not None and plan.step_ms is not None
        assert plan.step_lower_bound_ms <= best.orders * (1 + 1e-9) + 1e-9
        assert plan.step_ms <= best.orders * 1.05 + 1e-9

    check()


def test_the_ideals_of_one_order_prove_nothing_but_the_work() -> None:
    """Eleven nodes side by side: the plan is among the ideals of one order, and another order may be better."""
    wide = tuple(node(f"n{i}", ["x"], 1.0 + i) for i in range(11))
    costs = Costs(wide, (InputCost("x", 0, 0),), tuple(n.name for n in wide), rows=1)
    laid_out, workload = Scheduler(SEARCH, 2).lay_out(Machine.planned(2), 4)
    plan = Planner(costs, max_states=20).plan(laid_out, workload, LINE)
    work = 4 * sum(n.forward_ms + n.backward_ms for n in wide)
    assert plan.step_lower_bound_ms == pytest.approx(work / 2) and plan.step_ms is not None
    assert plan.step_ms < 0.7 * work
