"""Prices as sums over ideals agree with the prices of stages by definition, as a simulation reads them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.price import CostModel
from fxsplit.planner import Options, Task
from fxsplit.planner.planner import Planner
from fxsplit.planner.problem.borders import compress_cuts
from fxsplit.planner.step.bound import Stage
from fxsplit.planner.step.kernels.search import lies_between, make_stages, price_line
from fxsplit.planner.step.plans import place, price_plan
from fxsplit.planner.step.prices import find_nested, pack_members, price_ideals, sort_into_levels
from fxsplit.schedule.generators.catalogue import Scheduler
from fxsplit.schedule.of_plan import read_times
from fxsplit.schedule.schedule import Schedule
from tests.planner.step.test_bound import machines
from tests.support.graphs import profiles, sweep, try_examples

MADE = ("float32[4, 3]", "float32[64, 2]", "int64[4]")
"""Values that bf16 and int8 take down to fewer bytes, and one that they do not."""


@sweep(30, 1_000)
def test_a_line_has_the_times_that_a_simulation_reads(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(6), machines(4), st.booleans(), st.sampled_from(["", "bf16", "int8"]), st.randoms())
    def check(costs: Costs, machine: Machine, traffic: bool, compress: str, rng: object) -> None:
        nodes = tuple(replace(n, made=rng.choice(MADE)) for n in costs.nodes)  # type: ignore[attr-defined]
        costs = compress_cuts(replace(costs, nodes=nodes), compress)
        m = 4
        laid_out, workload = Scheduler("1F1B", len(machine)).lay_out(machine, m)
        task = Task(costs, laid_out, workload, Options(model="replicated", use_all=False, traffic=traffic))
        chains, _ = Planner(costs).lattice(machine)
        prices = price_ideals(costs, chains, machine, CostModel(traffic=traffic))
        inside, left = [0], len(machine)
        line = []
        while inside[-1] < len(chains) - 1:
            ends = [i for i in range(len(chains)) if i > inside[-1] and prices.nested[inside[-1], i]]
            end = rng.choice(ends) if left > 1 else len(chains) - 1  # type: ignore[attr-defined]
            replicas = rng.randint(1, left if end == len(chains) - 1 else left - 1)  # type: ignore[attr-defined]
            line.append(Stage(inside[-1], end, replicas))
            inside.append(end)
            left -= replicas
        plan = price_plan(task, chains, tuple(line))
        times = read_times(plan, Schedule("", m, place(tuple(line)), ()))
        stages = make_stages(len(line))
        price_line(np.array(line, np.int64), len(line), m, prices, stages)
        assert stages.forward == pytest.approx(np.array(times.forward_ms), rel=1e-9, abs=1e-9)
        backward = np.array(times.backward_ms) - np.array(times.weight_ms)
        assert stages.input == pytest.approx(backward, rel=1e-9, abs=1e-9)
        assert stages.weight == pytest.approx(np.array(times.weight_ms), rel=1e-9, abs=1e-9)
        reduce = [r * (s.replicas > 1) for r, s in zip(times.reduce_ms, line, strict=True)]
        assert stages.reduce == pytest.approx(np.array(reduce), rel=1e-9, abs=1e-9)

    check()


@sweep(20, 200)
def test_nested_ideals_are_subsets(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(6))
    def check(costs: Costs) -> None:
        chains, _ = Planner(costs).lattice(Machine.planned(2))
        nested, members = find_nested(chains), pack_members(chains)
        sets = [set(chains.ideal(i)) for i in range(len(chains))]
        assert nested.tolist() == [[a <= b for b in sets] for a in sets]
        for a, b, c in product(range(len(chains)), repeat=3):
            assert lies_between(members, a, b, c) == (nested[a, b] and nested[b, c])

    check()


@sweep(15, 300)
def test_levels_hold_the_least_and_the_most_of_their_ideals(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(7), machines(3), st.integers(1, 12))
    def check(costs: Costs, machine: Machine, count: int) -> None:
        chains, _ = Planner(costs).lattice(machine)
        prices = price_ideals(costs, chains, machine)
        levels = sort_into_levels(prices, count)
        work = prices.forward + prices.input + prices.weight
        assert levels.least[0].tolist() == levels.most[0].tolist() == [0.0] * 5
        assert levels.least[-1, 4] == levels.most[-1, 4] == work[-1] and len(levels.value) <= count + 3
        sums = np.column_stack([prices.forward, prices.input, prices.weight, prices.reduce, work])
        for i, own in enumerate(sums):
            fits = (levels.least <= own).all(axis=1) & (own <= levels.most).all(axis=1)
            fits &= (levels.value <= prices.value[i]) & (levels.gradient <= prices.gradient[i])
            assert fits.any()

    check()
