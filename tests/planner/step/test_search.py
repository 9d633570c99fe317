"""List schedules are what the simulator says, and the search only gets better than the lines it begins from."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner.planner import Planner
from fxsplit.planner.step.bound import Stage
from fxsplit.planner.step.kernels import compile_kernels, search
from fxsplit.planner.step.plans import write_schedule
from fxsplit.planner.step.prices import price_ideals
from fxsplit.planner.step.search import LineSearch, list_neighbours, read_line
from fxsplit.schedule.simulation.simulate import Times, simulate
from fxsplit.schedule.verify import verify
from tests.planner.step.test_bound import machines
from tests.support.graphs import profiles, sweep, try_examples


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Compile the kernels, as the planner does."""
    compile_kernels()


def prepare(costs: Costs, machine: Machine, m: int, most: int = 4) -> LineSearch:
    chains, _ = Planner(costs).lattice(machine)
    return LineSearch(price_ideals(costs, chains, machine), list_neighbours(chains), len(machine), m, most)


@sweep(40, 1_000)
def test_every_list_schedule_is_legal_and_takes_its_simulated_step(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(6), machines(4), st.integers(1, 6), st.integers(0, search.RULES - 1))
    def check(costs: Costs, machine: Machine, m: int, rule: int) -> None:
        found = prepare(costs, machine, m)
        found.run()
        for line in found.rank()[:5]:
            found.rules[line] = rule
            schedule = write_schedule(line, m, found.list_actions(line))
            verify(schedule)
            stages = search.make_stages(len(line))
            search.price_line(np.array(line, np.int64), len(line), m, found.prices, stages)
            times = Times(
                stages.forward.tolist(),
                (stages.input + stages.weight).tolist(),
                weight_ms=stages.weight.tolist(),
                reduce_ms=stages.reduce.tolist(),
            )
            step = simulate(schedule, times).step_ms
            assert step >= found.bound_line(line) * (1 - 1e-9)
            # The rule by which the line was judged is at least as good.
            assert found.steps[line] <= step * (1 + 1e-9)
            limits = np.zeros(len(line), np.int64)
            forward_first, share = search.choose_rule(rule, len(line), m, stages.replicas, limits)
            own = search.list_order(len(line), m, stages, limits, forward_first, share, found._room, False)
            assert own == pytest.approx(step, rel=1e-9, abs=1e-9)

    check()


@sweep(20, 300)
def test_annealing_keeps_lines_legal_and_never_makes_the_best_worse(examples: int) -> None:
    @try_examples(examples)
    @given(profiles(8), machines(4), st.integers(1, 6), st.integers(0, 2**31 - 1))
    def check(costs: Costs, machine: Machine, m: int, seed: int) -> None:
        found = prepare(costs, machine, m)
        full = len(found.prices.forward) - 1
        begin = (Stage(0, full, 1),)
        found.add(begin)
        room = np.zeros((found.devices, 4), np.int64)
        room[0] = begin[0]
        step, k = search.anneal_line(
            room,
            1,
            found.devices,
            m,
            found.most_replicas,
            found.prices,
            found.lattice,
            300,
            0.01,
            0.0,
            seed,
            found._room,
            True,
        )
        line = read_line(room[:k])
        assert line[0].begin == 0 and line[-1].end == full
        assert all(a.end == b.begin for a, b in pairwise(line))
        assert all(found.prices.nested[stage.begin, stage.end] and stage.begin < stage.end for stage in line)
        assert sum(stage.replicas for stage in line) <= found.devices
        assert max(stage.replicas for stage in line) <= found.most_replicas
        found.add(line)
        assert found.steps[line] == pytest.approx(step) and step <= found.steps[begin] * (1 + 1e-12)

    check()


def test_a_search_says_how_close_it_is() -> None:
    costs = Planner(_chain(8)).costs
    found = prepare(costs, Machine.planned(4), 8)
    assert found.best == search.NEVER and found.rank() == []
    found.run()
    # Four replicas of two microbatches each have nothing to wait for, and free links.
    assert found.is_close() and found.rank()[0] == (Stage(0, 8, 4),)
    assert found.best == pytest.approx(found.bound, rel=1e-6)


def _chain(count: int) -> Costs:
    from fxsplit.ir.facts.costs.costs import InputCost
    from tests.support.graphs import node

    nodes = tuple(node(f"n{i}", [f"n{i - 1}" if i else "x"]) for i in range(count))
    return Costs(nodes, (InputCost("x", 0, 0),), (f"n{count - 1}",), rows=1)
