"""The search: the smallest threshold under which a chain of stages exists, with its proof."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from fxsplit.ir.facts.antichains import Antichains
from fxsplit.planner.clock import Clock, OutOfTime
from fxsplit.planner.dense import best_line, best_path, first_order
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.problem import Path, Problem

SLACK = 1e-9
"""Relative distance below which two loads count as equal: thresholds are compared in floating point."""
LEAP = 0.35
"""Where between the bounds to test next: refusals cost less than chains, so nearer to the lower one."""

ANYTHING = 1e200
"""A threshold above every load, and yet finite: zero times it is zero."""


@dataclass(frozen=True)
class Found:
    """The best chain, its slowest load, and a load that no chain beats; the two agree unless time ran out."""

    path: Path
    load: float
    lower: float


def minimise(problem: Problem, chains: Antichains, clock: Clock | None = None) -> Found | None:
    """Return the chain of states whose slowest stage is fastest, or None when no chain fits.

    Small lattices are solved by definition. In large ones every chain of one topological order comes first, which is
    often the best there is; then thresholds are tested, between the lower bound and just below the best so far, until
    nothing is left between them. When time is up the best so far is returned, or OutOfTime raised where there is none.
    """
    clock = clock or Clock()
    if len(problem) <= SMALL:
        path, proven = best_path(problem, chains, clock=clock)
        if path is None and not proven:
            raise OutOfTime
        if path is None:
            return None
        load = max(problem.loads(path))
        return Found(path, load, load if proven else min(problem.lower_bound(), load))
    rough = best_line(problem, chains)
    if rough is None and len(problem) > len(chains.blocks) + 1:
        order = first_order(chains)
        line = _by_thresholds(problem.restricted(order), Clock(), None)
        rough = None if line is None else [(order[state], move) for state, move in line.path]
    return _by_thresholds(problem, clock, rough)


def _by_thresholds(problem: Problem, clock: Clock, best: Path | None) -> Found | None:
    """Return the best chain by tests of thresholds; `best` is a good one, if one is known."""
    lower = problem.lower_bound()
    best = best or _climb(problem, lower, clock)
    if best is None:
        return None
    upper = max(problem.loads(best))
    closer = problem.under(upper)
    bisect = False
    with suppress(OutOfTime):  # what is known by then is a plan and a bound
        while upper - lower > 2 * SLACK * abs(upper):
            threshold = lower + LEAP * (upper - lower) if bisect else upper - SLACK * abs(upper)
            bisect = not bisect
            found = closer.test(threshold, clock)
            if found is None:
                lower = max(lower, threshold)
                continue
            load = max(problem.loads(found))
            if load >= upper:
                break  # the test's sums have lost more digits than are left to tell
            best, upper = found, load
    return Found(best, upper, min(lower, upper))


def beats(problem: Problem, chains: Antichains, load: float, clock: Clock | None = None) -> bool:
    """Return whether a chain exists whose slowest stage is faster than `load`; when time is up, whether one might."""
    below = load - SLACK * abs(load)
    if problem.lower_bound() > below:
        return False
    if len(problem) <= SMALL:
        path, proven = best_path(problem, chains, below, clock or Clock())
        return path is not None or not proven
    try:
        return problem.under(load).test(below, clock) is not None
    except OutOfTime:
        return True


def _climb(problem: Problem, lower: float, clock: Clock) -> Path | None:
    """Return a chain not far from the best: tests cost the less, the less their threshold allows."""
    step = 0.01
    while True:
        threshold = lower * (1 + step) if lower > 0 and step < 1e4 else ANYTHING
        found = problem.test(threshold, clock)
        if found is not None or threshold == ANYTHING:
            return found
        step *= 4
