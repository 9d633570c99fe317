"""Explain why no plan exists: contradictory pins, or a stage that lacks memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from fxsplit.errors import NoFit, PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.price import find_ends, name_span
from fxsplit.planner.clock import OutOfTime, SearchClock
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.problem.problem import Path, Problem
from fxsplit.planner.search.search import BestChain, find_any, minimise
from fxsplit.system.figures import format_bytes

NEAR_BYTES, NEAR, NEAR_IN_LARGE = 0.5, 1e-6, 1e-3
"""The bisection for the least excess of memory stops at NEAR_BYTES bytes, or at a relative width of NEAR.

In a large lattice each trial takes a second, so the relative width is NEAR_IN_LARGE.
"""


def explain_misfit(
    problems: Sequence[Problem],
    chains: Antichains,
    costs: Costs,
    machine: Machine,
    schedule: str,
    clock: SearchClock,
    *,
    complete: bool,
    keeps: str,
) -> PlanError:
    """Return the error for a search without a plan: contradictory pins, or the stage that lacks memory and by how much.

    `problems` has one search problem for each number of stages that was tried. Each is solved again without memory
    limits. If that fails too, the pins are at fault. Otherwise the error describes the chain that exceeds the memory by
    the fewest bytes. `complete`: whether the search covered all plans that the options allow. `keeps`: the option that
    would let stages recompute, which the error then suggests; "" if they may recompute already, or never can.
    """
    some = (
        ""
        if chains.complete
        else " among the states of one topological order; allow more states (augment{max_states=})"
    )
    if chains.complete and not complete:
        some = " that leaves only the last devices idle; leave those out that are of no use"
    tries: list[tuple[float, list[float], Path]] = []
    try:
        # Without limits and prices (`direct` prices are slow), only the pins and the number of stages rule a chain out.
        possible = [p for p in problems if find_any(p.for_excess(), chains, clock) is not None]
        # With more stages each stage holds less. So after the largest number, few numbers come closer.
        for problem in sorted(possible, key=lambda problem: -problem.moves.n_stages):
            nearest = min(tries)[0] if tries else inf
            # The sums over states never exceed the true memory of a stage, so this is a lower bound.
            found = minimise(problem.for_excess(), chains, clock, upper=nearest)
            if found is not None:
                path = find_least_excess(problem, chains, clock, found)
                excess = list_excess(problem, path)
                tries.append((max(excess), excess, path))
    except OutOfTime:
        return NoFit(
            f"no plan fits{some}; allow more time (partition{{time_limit=}}) to see which stage is short of memory"
        )
    if not possible:
        # If only one topological order was searched, other states might still satisfy the pins.
        kind = PlanError if complete else NoFit
        return kind(
            f"no plan for {len(machine)} devices satisfies the pins{some}: some pinned node depends on one that is "
            "pinned to a later stage, or a stage would stay empty; pin fewer submodules or use fewer devices"
        )
    _, loads, path = min(tries, key=lambda attempt: attempt[0])
    worst = int(np.argmax(loads))
    # All replicas of a stage hold the same: show the first.
    device = machine.devices[path[worst][1].devices[0]]
    # 1F1B holds the fewest microbatches of all schedules.
    earlier = "" if schedule == "1F1B" else "schedule='1F1B', "
    again = f"stages that recompute ({keeps}), " if keeps else ""
    need, there = device.memory_bytes + loads[worst], device.memory_bytes
    sizes = [format_bytes(need), format_bytes(there)]
    if sizes[0] == sizes[1]:
        sizes = [f"{need:,.0f}", f"{there:,.0f} bytes"]
    return NoFit(
        f"no plan fits in memory{some}: even the best leaves stage {worst} of {len(loads)} on {device.name}"
        f"{_name_place(costs, chains, path, worst)} short by "
        f"{format_bytes(loads[worst])} ({loads[worst]:.0f} bytes): "
        f"it needs {sizes[0]} of {sizes[1]}; use more devices, more and smaller microbatches, {again}{earlier}or "
        "partition{optimizer_factor=} if your optimizer keeps less than Adam",
        short_bytes=float(loads[worst]),
    )


def _name_place(costs: Costs, chains: Antichains, path: Path, stage: int) -> str:
    """Return the first and last node of a stage as " (...)", or "" for a stage without nodes."""
    blocks = set(chains.ideal(path[stage][0])) - set(chains.ideal(path[stage - 1][0]) if stage else ())
    first, last = find_ends([node for node in costs.nodes if chains.blocks.home[node.name] in blocks])
    return f" ({name_span(first, last)})" if first else ""


def find_least_excess(problem: Problem, chains: Antichains, clock: SearchClock, found: BestChain) -> Path:
    """Return the chain whose stages exceed the memory of their devices by the fewest bytes.

    `found` is the best chain by sums over states, which never exceed the true memory of a stage.
    """
    best, least, most = found.path, found.lower, max(list_excess(problem, found.path))
    # Search with larger devices to see whether a chain with less excess exists. Try first just below the best: usually
    # the best chain by sums is the best of all, and one failed search proves it.
    bisect = False
    share = NEAR if len(problem) <= SMALL else NEAR_IN_LARGE
    while (near := max(NEAR_BYTES, share * abs(most))) < most - least:
        trial = (least + most) / 2 if bisect else most - near
        bisect = not bisect
        path = find_any(problem.with_more_memory(trial), chains, clock)
        if path is None:
            least = trial
        else:
            best, most = path, min(trial, max(list_excess(problem, path)))
    return best


def list_excess(problem: Problem, path: Path) -> list[float]:
    """Return by how many bytes each stage of a chain exceeds its devices' memory; at most 0 if the stage fits."""
    known = {(begin, end): excess for _, begin, end, excess in problem.list_excess(path)}
    loads, begin, found = problem.for_excess().loads(path), 0, []
    for load, (end, _) in zip(loads, path, strict=True):
        found.append(known.get((begin, end), load))
        begin = end
    return found
