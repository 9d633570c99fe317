"""The search: the smallest threshold under which a chain of stages exists, with its proof."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from fxsplit.antichains import Antichains
from fxsplit.errors import NoFit, PlanError
from fxsplit.kernels import SMALL
from fxsplit.machine import Machine
from fxsplit.planner.dense import best_line, best_path
from fxsplit.planner.problem import Path, Problem
from fxsplit.plans import size

SLACK = 1e-9
"""Relative distance below which two loads count as equal: thresholds are compared in floating point."""
LEAP = 0.35
"""Where between the bounds to test next: refusals cost less than chains, so nearer to the lower one."""

ANYTHING = 1e200
"""A threshold above every load, and yet finite: zero times it is zero."""


@dataclass(frozen=True)
class Found:
    """The best chain and a load that no chain of these states beats; the two agree unless time ran out."""

    path: Path
    lower: float


def minimise(problem: Problem, chains: Antichains, deadline: float = inf) -> Found | None:
    """Return the chain of states whose slowest stage is fastest, or None when no chain fits.

    Small lattices are solved by definition. In large ones every chain of one topological order comes first, which is
    often the best there is; then thresholds are tested, between the lower bound and just below the best so far, until
    nothing is left between them. After `deadline` (seconds of time.monotonic) the best so far is returned.
    """
    if len(problem) <= SMALL:
        path = best_path(problem, chains)
        return None if path is None else Found(path, max(problem.loads(path)))
    lower = problem.lower_bound()
    best = best_line(problem, chains) or _climb(problem, lower)
    if best is None:
        return None
    upper = max(problem.loads(best))
    bisect = False
    while upper - lower > 2 * SLACK * abs(upper) and time.monotonic() < deadline:
        threshold = lower + LEAP * (upper - lower) if bisect else upper - SLACK * abs(upper)
        bisect = not bisect
        found = problem.test(threshold)
        if found is None:
            lower = max(lower, threshold)
        else:
            best, upper = found, min(upper, max(problem.loads(found)))
    return Found(best, min(lower, upper))


def beats(problem: Problem, chains: Antichains, load: float) -> bool:
    """Return whether a chain exists whose slowest stage is faster than `load`."""
    below = load - SLACK * abs(load)
    if problem.lower_bound() > below:
        return False
    return (best_path(problem, chains, below) if len(problem) <= SMALL else problem.test(below)) is not None


def _climb(problem: Problem, lower: float) -> Path | None:
    """Return a chain not far from the best: tests cost the less, the less their threshold allows."""
    step = 0.01
    while True:
        threshold = lower * (1 + step) if lower > 0 and step < 1e4 else ANYTHING
        found = problem.test(threshold)
        if found is not None or threshold == ANYTHING:
            return found
        step *= 4


def misfit(problems: Sequence[Problem], chains: Antichains, machine: Machine) -> PlanError:
    """Return the error that says why no chain exists: contradictory pins, or how much memory is missing and where.

    `problems` are those of all numbers of stages that were tried.
    """
    some = "" if chains.complete else " among the states of one topological order; allow more states"
    possible = [p for p in problems if minimise(p.without_memory(), chains) is not None]
    if not possible:
        kind = PlanError if chains.complete else NoFit
        return kind(
            f"no plan for {len(machine)} devices satisfies the pins{some}: some pinned node depends on one that is "
            "pinned to a later stage, or a stage would stay empty; pin fewer submodules or use fewer devices"
        )
    tries = []
    for problem in possible:
        relaxed = problem.for_excess()
        found = minimise(relaxed, chains)
        assert found is not None
        tries.append((max(relaxed.loads(found.path)), relaxed, found))
    _, relaxed, found = min(tries, key=lambda attempt: attempt[0])
    loads = relaxed.loads(found.path)
    worst = int(np.argmax(loads))
    device = machine.devices[found.path[worst][1].devices[0]]
    need = device.memory_bytes + loads[worst]
    return NoFit(
        f"no plan fits in memory{some}: even the best leaves stage {worst} of {len(loads)} on {device.name} short by "
        f"{size(loads[worst])} ({loads[worst]:.0f} bytes): it needs {size(need)} of {size(device.memory_bytes)}; use "
        "more devices, more and smaller microbatches, schedule='1F1B', or partition{optimizer_factor=} if your "
        "optimizer keeps less than Adam"
    )
