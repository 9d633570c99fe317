"""The schedule that is chosen for a plan has the shortest simulated step of all that fit in memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from fxsplit.api.plan import lay_out
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner import Options
from fxsplit.planner.planner import Planner
from fxsplit.schedule import choose_schedule as choosing
from fxsplit.schedule import simulate
from fxsplit.schedule.choose_schedule import choose_schedule
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.of_plan import build_schedule, read_footprints, read_times
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.schedule_plan import schedule_plan, search_for_plan
from fxsplit.schedule.simulation.memory import find_peak, trace_memory
from tests.cli.test_plan import chain
from tests.schedule.test_schedule_plan import make_machine

Facts = tuple[Plan, Costs, Machine, Workload]
NAMED = ("1F1B", "GPipe", "ZB-H1", "ZB-H2")


def make_facts(costs: Costs, memory_bytes: float = inf, count: int = 3, n_microbatches: int = 6) -> Facts:
    machine, workload = lay_out(make_machine(count, memory_bytes), "1F1B", n_microbatches)
    return Planner(costs).plan(machine, workload, Options(use_all=True)), costs, machine, workload


def make_costs(seed: int) -> Costs:
    random = Random(seed)
    sizes = [random.choice([10, 20, 30, 50]) for _ in range(8)]
    made = chain(sizes, kept_bytes=random.choice([100, 1000]), parameter_bytes=10)
    nodes = tuple(replace(node, weight_ms=random.random() * node.backward_ms) for node in made.nodes)
    return replace(made, nodes=nodes)


def simulate_named(facts: Facts, name: str) -> tuple[float, bool]:
    """Return the step of a plan planned for a schedule by name in ms, and whether a simulation keeps the limits."""
    plan, costs, machine, workload = facts
    limit = machine.devices[0].memory_bytes
    scheduler = Scheduler(name, len(machine))
    its = replace(plan, schedule=name)
    described = scheduler.describe(len(machine), workload.n_microbatches)
    made, _, _ = schedule_plan(its, costs, machine, described)
    run = simulate(schedule := build_schedule(made, scheduler, plan.n_microbatches), read_times(made, schedule))
    return run.step_ms, all(find_peak(t) <= limit * (1 + 1e-9) for t in trace_memory(run, read_footprints(made)))


def read_schedule(plan: Plan) -> Schedule:
    return build_schedule(plan, Scheduler(plan.schedule, len(plan.stages)), plan.n_microbatches)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("room", [1.0, 1.2, 1.6, inf])
def test_it_is_the_shortest_step_that_fits(seed: int, room: float) -> None:
    costs = make_costs(seed)
    free = make_facts(costs)
    limit = room * max(stage.memory_bytes for stage in free[0].stages)
    facts = make_facts(costs, limit)
    made, workload = choose_schedule(*facts, limit_s=0)
    schedule = read_schedule(made)
    step = simulate(schedule, read_times(made, schedule)).step_ms
    steps = {name: simulate_named(facts, name) for name in NAMED}
    assert step == pytest.approx(min(step_ms for step_ms, fits in steps.values() if fits), rel=1e-5)
    assert steps[made.schedule][1] and workload.schedule == made.schedule
    assert all(stage.memory_bytes <= limit for stage in made.stages)
    assert [s.nodes for s in made.stages] == [s.nodes for s in facts[0].stages]
    assert (made.proof, made.bottleneck_ms) == (facts[0].proof, facts[0].bottleneck_ms)
    # The plan says what was compared, and which of the faster ones did not fit.
    assert sorted(c.step_ms for c in made.compared) == [c.step_ms for c in made.compared]
    assert {c.schedule: pytest.approx(c.step_ms, rel=1e-5) for c in made.compared} == {
        name: step_ms for name, (step_ms, _) in steps.items()
    }
    own = [c.schedule for c in made.compared].index(made.schedule)
    assert [c.fits for c in made.compared] == [False] * own + [True] + [None] * (len(NAMED) - own - 1)


def test_of_equal_steps_1f1b_is_taken() -> None:
    costs = chain([20] * 4, kept_bytes=100)
    whole = replace(costs, nodes=tuple(replace(node, weight_ms=0.0) for node in costs.nodes))
    made, _ = choose_schedule(*make_facts(whole, count=2), limit_s=0)
    assert made.schedule == "1F1B" and len({c.step_ms for c in made.compared}) == 1
    assert str(made).splitlines()[-1].startswith("1F1B, since its simulated step of ")


def test_the_last_line_says_why() -> None:
    costs = make_costs(3)
    free = make_facts(costs)
    first, _ = choose_schedule(*free, limit_s=0)
    assert first.schedule != "1F1B"
    last = str(first).splitlines()[-1]
    assert last.startswith(
        f"{first.schedule}, since its simulated step of {first.compared[0].step_ms:.3f} ms is the sh"
    )
    assert "fits" not in last and all(f"{c.schedule} {c.step_ms:.3f} ms" in last for c in first.compared[1:])
    tight = make_facts(costs, max(stage.memory_bytes for stage in free[0].stages))
    second, _ = choose_schedule(*tight, limit_s=0)
    last = str(second).splitlines()[-1]
    assert "is the shortest that fits in memory: " in last and " ms (too much memory)" in last


def test_backwards_stay_whole_if_they_cannot_be_split() -> None:
    made, _ = choose_schedule(*make_facts(make_costs(1)), limit_s=0, splits=False)
    assert {c.schedule for c in made.compared} == {"1F1B", "GPipe"} and not read_schedule(made).splits


def test_a_search_takes_part_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "is_warm", lambda: True)
    facts = make_facts(make_costs(5), count=4, n_microbatches=5)
    made, workload = choose_schedule(*facts, limit_s=60)
    found = search_for_plan(facts[0], time_limit_s=60)
    steps = {c.schedule: c.step_ms for c in made.compared}
    assert steps[SEARCH] == pytest.approx(found.step_ms, rel=1e-5) == made.compared[0].step_ms
    assert simulate(read_schedule(made), read_times(made, read_schedule(made))).step_ms == pytest.approx(found.step_ms)
    assert bool(made.schedule_csv) == (made.schedule == SEARCH) and workload.schedule_csv == made.schedule_csv
    # No time is left, or devices wait for their messages.
    for given in (facts, (replace(facts[0], transfers="blocking"), *facts[1:])):
        made, _ = choose_schedule(*given, limit_s=0 if given is facts else 60)
        assert SEARCH not in {c.schedule for c in made.compared}


def test_replicas_run_under_schedules_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "is_warm", lambda: True)
    machine, workload = lay_out(make_machine(3), "1F1B", 6)
    costs = chain([10, 60, 60, 10], kept_bytes=100)
    plan = Planner(costs).plan(machine, workload, Options(model="replicated", use_all=True))
    assert any(len(stage.devices) > 1 for stage in plan.stages)
    made, _ = choose_schedule(plan, costs, machine, workload, limit_s=60)
    assert {c.schedule for c in made.compared} == {"1F1B", "GPipe", "ZB-H1"}
    assert [s.devices for s in made.stages] == [s.devices for s in plan.stages]


def test_long_steps_leave_out_what_takes_long() -> None:
    made, _ = choose_schedule(*make_facts(make_costs(2), count=4, n_microbatches=64), limit_s=0)
    assert {c.schedule for c in made.compared} == {"1F1B", "GPipe", "ZB-H1"}


def test_a_stated_order_is_kept() -> None:
    facts = make_facts(make_costs(1))
    stated = replace(facts[0], schedule_csv="0F0")
    assert choose_schedule(stated, *facts[1:], limit_s=0) == (stated, facts[3])


def test_a_plan_that_does_not_fit_keeps_its_schedule() -> None:
    plan, costs, machine, workload = make_facts(make_costs(1))
    tight = replace(machine, devices=tuple(replace(d, memory_bytes=1.0) for d in machine.devices))
    assert choose_schedule(plan, costs, tight, workload, limit_s=0) == (plan, workload)
