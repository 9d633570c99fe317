"""The search: the chain of states whose slowest stage is fastest, with a proof that no chain is faster.

In a large lattice the search asks, for one threshold after another, whether a chain exists whose every stage has a
smaller load. A chain lowers the upper bound, a refusal raises the lower bound, and the two meet at the optimum.
"""

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
"""A threshold above every load. It is finite, since zero times infinity is no number."""


@dataclass(frozen=True)
class Found:
    """The best chain, its slowest load, and a load that no chain beats, in ms; the loads agree unless time ran out."""

    path: Path
    load: float
    lower: float


def minimise(problem: Problem, chains: Antichains, clock: Clock | None = None) -> Found | None:
    """Return the chain of states whose slowest stage is fastest, or None when no chain fits.

    Small lattices are solved by definition (dense.py). In large ones the chains of one topological order come first,
    of which the best is often the best of all. Then thresholds are tested, between the lower bound and just below the
    best so far, until nothing is left between them. When time is up the best so far is returned; raises OutOfTime where
    there is none.
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
    # Where the dense solver cannot take a line, because it is long, thresholds on the line do.
    if rough is None and len(problem) > len(chains.blocks) + 1:
        order = first_order(chains)
        line = _by_thresholds(problem.restricted(order), Clock(), None)
        rough = None if line is None else [(order[state], move) for state, move in line.path]
    return _by_thresholds(problem, clock, rough)


def _by_thresholds(problem: Problem, clock: Clock, best: Path | None) -> Found | None:
    """Return the best chain by tests of thresholds; `best` is a good chain, if one is known."""
    lower = problem.lower_bound()
    best = best or _climb(problem, lower, clock)
    if best is None:
        return None
    upper = max(problem.loads(best))
    closer = problem.under(upper)
    # Test just below the best first: if it is the optimum already, one refusal is the proof.
    bisect = False
    # What is known when time is up is a plan and a bound.
    with suppress(OutOfTime):
        while upper - lower > 2 * SLACK * abs(upper):
            threshold = lower + LEAP * (upper - lower) if bisect else upper - SLACK * abs(upper)
            bisect = not bisect
            found = closer.test(threshold, clock)
            if found is None:
                lower = max(lower, threshold)
                continue
            load = max(problem.loads(found))
            # The sums of the test have lost more digits than the bounds lie apart.
            if load >= upper:
                break
            best, upper = found, load
    return Found(best, upper, min(lower, upper))


def beats(problem: Problem, chains: Antichains, load: float, clock: Clock | None = None) -> bool:
    """Return whether some chain's slowest stage is faster than `load` ms; when time is up, whether that might be so."""
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


def find_any(problem: Problem, chains: Antichains, clock: Clock) -> Path | None:
    """Return a chain that fits, however slow, or None where there is none; raises OutOfTime."""
    if len(problem) > SMALL:
        return problem.test(ANYTHING, clock)
    path, proven = best_path(problem, chains, clock=clock)
    if path is None and not proven:
        raise OutOfTime
    return path


def _climb(problem: Problem, lower: float, clock: Clock) -> Path | None:
    """Return a chain not far from the best: thresholds rise until one allows a chain, as low ones are cheap to test."""
    step = 0.01
    while True:
        threshold = lower * (1 + step) if lower > 0 and step < 1e4 else ANYTHING
        found = problem.test(threshold, clock)
        if found is not None or threshold == ANYTHING:
            return found
        step *= 4
