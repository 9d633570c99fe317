"""The solver for small graphs: membership, inclusion, lines, and a best chain that can be counted by hand."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import HealthCheck, given, settings

from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.planner import Options, Task, antichains, pose_problems, sequence_states
from fxsplit.planner.search.dense import best_line, best_path, contained, first_order, line_of, membership
from tests.planner.lattice.test_lattice import DIAMOND
from tests.support.graphs import node, profiles, workload


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(profiles(6))
def test_membership_and_inclusion(costs: Costs) -> None:
    chains = antichains(costs, 10**4)
    sets = [set(chains.ideal(i)) for i in range(len(chains))]
    every = np.arange(len(chains))
    assert [set(np.flatnonzero(row)) for row in membership(chains, every)] == sets
    assert [set(np.flatnonzero(row)) for row in membership(chains, every[::-1])] == sets[::-1]
    assert contained(chains).tolist() == [[a < b for b in sets] for a in sets]


def test_lines_of_the_diamond() -> None:
    chains = antichains(DIAMOND, 100)
    order = first_order(chains)
    assert ["".join(chains.names(i)) for i in order] == ["", "a", "ab", "abc", "abcd"]
    line = line_of(chains, order)
    assert [line.names(i) for i in range(len(line))] == [chains.names(i) for i in order]
    assert line.live_bytes.tolist() == [16, 1, 3, 6, 8] and line.pointer.tolist() == [0, 1, 2, 3, 4, 4]


def test_the_best_chain_beats_the_best_line() -> None:
    """Two branches of 3 + 1 and 2 + 2 ms forward: only a cut through both gives 12 ms each side."""
    costs = Costs(
        (node("a", ms=3.0), node("b", ["a"], 1.0), node("c", ms=1.0), node("d", ["c"], 3.0)), (), ("b", "d"), rows=1
    )
    machine = Machine.planned(2)
    chains = antichains(costs, 100)
    (problem,) = pose_problems(
        Task(costs, machine, workload(machine), Options()), chains, sequence_states(costs, chains)
    )
    path, proven = best_path(problem, chains)
    assert path is not None and proven and max(problem.loads(path)) == 12.0
    assert best_path(problem, chains, upper=12.0) == (None, True), "no load is below the optimum"
    rough = best_line(problem, chains)
    assert rough is not None and 12.0 <= max(problem.loads(rough)) < inf
