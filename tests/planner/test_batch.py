"""The number of microbatches, chosen with the plan: beside every plan of every number on small graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.errors import InputError, NoFit, ProfileError
from fxsplit.formats.plan_json import parse_plan, plan_to_dict
from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner.batch import check_several, choose_count, list_sizes
from tests.planner.step.test_bound import machines
from tests.planner.step.test_step import STEP, chain, solve
from tests.support.graphs import profiles, sweep, try_examples
from tests.support.steps import find_best_that_fits, find_shortest

NAMES = ["first", "second", "third"]


def at(rows: int, *ms: float, fixed: float = 0.0, **figures: Any) -> Costs:
    """A chain whose nodes take so many ms a row, and `fixed` ms more for every microbatch."""
    return replace(chain(*(fixed + rows * each for each in ms), **figures), rows=rows)


def choose(profiles: list[Costs], n_microbatches: int, machine: Machine) -> Plan:
    sizes = list_sizes(profiles, NAMES[: len(profiles)], n_microbatches)
    return choose_count(sizes, machine, lambda costs, m: solve(costs, machine, m, STEP))


def scale(costs: Costs, rows: int, factors: dict[str, float]) -> Costs:
    """The costs of `rows` rows, by the definition of a straight line through 1 and 4 rows, without launches."""

    def take(n: NodeCost) -> NodeCost:
        grown = 1 + (rows - 1) / 3 * (factors[n.name] - 1)
        times = {name: grown * getattr(n, name) for name in ("forward_ms", "backward_ms")}
        return replace(n, **times, forward_launch_ms=0.0, backward_launch_ms=0.0)

    return replace(costs, nodes=tuple(map(take, costs.nodes)), rows=rows)


@sweep(12, 200)
def test_a_plan_is_as_good_as_every_plan_of_every_number_and_above_its_bound(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(4), machines(), st.lists(st.sampled_from([1.0, 1.5, 2.5, 4.0, 5.0]), min_size=4, max_size=4))
    def check(costs: Costs, machine: Machine, factors: list[float]) -> None:
        grown = {f"n{i}": factor for i, factor in enumerate(factors)}
        # A batch of four rows: four microbatches of one, two of two rows, which nobody has measured, or one of four.
        plan = choose([scale(costs, 1, grown), scale(costs, 4, grown)], 4, machine)
        found = {m: find_shortest(scale(costs, 4 // m, grown), machine, m, replicas=True) for m in (1, 2, 4)}
        best, named = min(f.orders for f in found.values()), min(f.named for f in found.values())
        assert plan.step_ms is not None and plan.step_lower_bound_ms is not None
        assert plan.step_lower_bound_ms <= best * (1 + 1e-9) + 1e-9
        assert plan.step_ms <= named * (1 + 1e-9) + 1e-9 and plan.step_ms <= best * 1.05 + 1e-9
        if all(f.complete for f in found.values()):
            assert plan.step_ms >= best * (1 - 1e-9) - 1e-9
        assert [c.n_microbatches for c in plan.compared_counts] == [1, 2, 4]
        for count in plan.compared_counts:
            assert count.lower_bound_ms <= found[count.n_microbatches].orders * (1 + 1e-9) + 1e-9
            assert count.step_ms is None or count.step_ms >= plan.step_ms
            assert count.between == ((1, 4) if count.n_microbatches == 2 else ())
        # What it says of itself is read back from a file.
        again = parse_plan(json.loads(json.dumps(plan_to_dict(plan))), "a plan")
        assert (again.compared_counts, again.standing) == (plan.compared_counts, plan.standing)

    check()


@sweep(8, 100)
def test_memory_counts_for_each_number_by_itself(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(3), machines(), st.sampled_from([1e3, 3e3, 6e3, 1e4]))
    def check(costs: Costs, machine: Machine, memory_bytes: float) -> None:
        grown = {f"n{i}": 3.0 for i in range(3)}
        machine = replace(machine, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in machine.devices))
        known = [scale(costs, rows, grown) for rows in (1, 4)]
        known[1] = replace(
            known[1],
            nodes=tuple(
                replace(n, kept_bytes=4 * n.kept_bytes, output_bytes=4 * n.output_bytes) for n in known[1].nodes
            ),
        )
        sizes = list_sizes(known, NAMES[:2], 4)
        fitting = {
            size.n_microbatches: find_best_that_fits(size.costs, machine, size.n_microbatches, replicas=True)
            for size in sizes
        }
        best = min((step for step in fitting.values() if step is not None), default=None)
        try:
            plan = choose_count(sizes, machine, lambda costs, m: solve(costs, machine, m, STEP))
        except NoFit:
            assert best is None
            return
        assert all(stage.memory_bytes <= memory_bytes for stage in plan.stages)
        assert plan.step_ms is not None and plan.step_lower_bound_ms is not None
        assert plan.step_lower_bound_ms <= plan.step_ms
        if best is not None:
            assert plan.step_lower_bound_ms <= best * (1 + 1e-9) + 1e-9 and plan.step_ms <= best * (1 + 1e-9) + 1e-9

    check()


@pytest.mark.parametrize(("fixed", "count"), [(0.0, 16), (8.0, 2), (0.5, 4)])
def test_overhead_for_each_microbatch_is_weighed_against_idle_time(fixed: float, count: int) -> None:
    """Weights whose gradients are slow to sum: a pipeline. Small microbatches leave less of it idle."""
    heavy = {"parameter_bytes": 10**9}
    known = [at(rows, 1.0, 1.0, fixed=fixed, **heavy) for rows in (1, 16)]
    plan = choose(known, 16, Machine.planned(2, 1e9))
    assert len(plan.stages) == 2 and plan.n_microbatches == count and plan.n_microbatches * plan.rows == 16
    steps = {
        m: solve(at(16 // m, 1.0, 1.0, fixed=fixed, **heavy), Machine.planned(2, 1e9), m).step_ms for m in (2, 4, 8, 16)
    }
    assert plan.step_ms == pytest.approx(min(step or inf for step in steps.values()))
    assert plan.interpolated_between == (() if count == 16 else (1, 16))
    assert ("times are interpolated between profiles of 1 and 16 rows" in str(plan)) == (count != 16)
    assert plan_to_dict(plan)["interpolated_between"] == (None if count == 16 else [1, 16])


def test_only_whole_numbers_of_rows_between_the_profiles_are_tried() -> None:
    sizes = list_sizes([at(4, 1.0), at(12, 1.0), at(5, 1.0)], NAMES, 6)
    assert [(s.n_microbatches, s.costs.rows, s.between) for s in sizes] == [
        (2, 12, ()),
        (3, 8, (5, 12)),
        (4, 6, (5, 12)),
        (6, 4, ()),
    ]
    fixed = [replace(at(rows, 1.0), fixed_rows=(rows,)) for rows in (4, 12)]
    assert [s.n_microbatches for s in list_sizes(fixed, NAMES[:2], 6)] == [2, 6]
    with pytest.raises(ProfileError, match="'second' is not a profile of the model in 'first'"):
        list_sizes([at(4, 1.0), at(8, 1.0, 1.0)], NAMES[:2], 6)


def test_a_number_whose_work_takes_longer_is_not_planned() -> None:
    asked: list[int] = []

    def plan_for(costs: Costs, m: int) -> Plan:
        asked.append(m)
        return solve(costs, Machine.planned(2), m)

    sizes = list_sizes([at(rows, 1.0, 1.0, fixed=50.0) for rows in (1, 8)], NAMES[:2], 8)
    plan = choose_count(sizes, Machine.planned(2), plan_for)
    assert 8 not in asked and {c.n_microbatches for c in plan.compared_counts if c.step_ms is not None} == set(asked)
    for size, count in zip(sizes, plan.compared_counts, strict=True):
        if count.step_ms is None:
            # The work of the microbatches, shared by two devices.
            assert count.lower_bound_ms == pytest.approx(size.n_microbatches * size.costs.total_ms / 2)
            assert plan.step_ms is not None and count.lower_bound_ms >= plan.step_ms
    assert "ms at least" in str(plan) and plan.optimal


def test_the_bound_is_that_of_the_best_number_only_if_no_other_is_below() -> None:
    known = [at(rows, 1.0, 1.0, fixed=1.0) for rows in (1, 2)]
    sizes = list_sizes(known, NAMES[:2], 2)
    plan = choose_count(sizes, Machine.planned(2), partial(loosen, Machine.planned(2)))
    bounds = [count.lower_bound_ms for count in plan.compared_counts]
    assert plan.step_lower_bound_ms == min(bounds) == 1.0 and plan.proof == "bound" and not plan.optimal


def loosen(machine: Machine, costs: Costs, m: int) -> Plan:
    """Return the plan of one number, with a bound that is loose unless there is one microbatch."""
    return replace(solve(costs, machine, m), step_lower_bound_ms=1.0 if m == 1 else 5.0).prove("bound")


def test_if_no_number_fits_the_error_names_them_all_and_says_if_that_is_proven() -> None:
    known = [at(rows, 1.0, parameter_bytes=10**6) for rows in (1, 4)]
    with pytest.raises(NoFit, match="no plan for 1, 2, 4 microbatches: no plan fits in memory, in any order") as error:
        choose(known, 4, Machine.planned(2, memory_bytes=1e6))
    assert error.value.proven
    # Only small microbatches fit. The others have no bound: none of their plans exists.
    kept = [at(rows, 1.0, 1.0, fixed=2.0, kept_bytes=rows * 10**6) for rows in (1, 4)]
    plan = choose(kept, 4, Machine.planned(1, memory_bytes=3e6))
    assert plan.n_microbatches == 4 and [c.lower_bound_ms for c in plan.compared_counts][:2] == [inf, inf]
    assert "no plan fits" in str(plan) and plan.optimal
    again = parse_plan(json.loads(json.dumps(plan_to_dict(plan))), "a plan")
    assert again.compared_counts == plan.compared_counts


def test_several_profiles_need_a_batch_and_the_best_plan() -> None:
    assert check_several(2, 4, best=True) == 4
    for count, m, best, message in (
        (2, 4, False, "give best=True"),
        (2, None, True, "give n_microbatches="),
        (0, 4, True, "empty"),
    ):
        with pytest.raises(InputError, match=message):
            check_several(count, m, best=best)
