"""The search: the chain of states whose slowest stage is fastest, with a proof that no chain is faster.

In a large lattice the search asks, for one threshold after another, whether a chain exists whose every stage has a
smaller load. A chain lowers the upper bound, a refusal raises the lower bound, and the two meet at the optimum.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import inf

import numpy as np

from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.planner.clock import Clock, OutOfTime
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.problem.problem import Path, Problem
from fxsplit.planner.search.dense import best_line, best_path, first_order

SLACK = 1e-9
"""Relative distance below which two loads count as equal: thresholds are compared in floating point."""
LEAP = 0.35
"""Where between the bounds to test next: refusals cost less than chains, so nearer to the lower one."""

HALF_A_BYTE = 0.5
"""By so many bytes sums of memory may be off that are compared with a device's."""
ANYTHING = 1e200
"""A threshold above every load. It is finite, since zero times infinity is no number."""


@dataclass(frozen=True)
class Found:
    """The best chain, its slowest load, and a load that no chain beats, in ms; the loads agree unless time ran out."""

    path: Path
    load: float
    lower: float


def minimise(
    problem: Problem, chains: Antichains, clock: Clock | None = None, *, lower: float = 0.0, upper: float = inf
) -> Found | None:
    """Return the chain of states whose slowest stage is fastest, or None when no chain below `upper` ms fits.

    Small lattices are solved by definition (dense.py). In large ones the chains of one topological order come first,
    of which the best is often the best of all. Then thresholds are tested, between the lower bound and just below the
    best so far, until nothing is left between them. No chain beats `lower` ms, as the caller knows. When time is up the
    best so far is returned; raises OutOfTime where there is none.
    """
    clock = clock or Clock()
    lower = max(lower, problem.lower_bound())
    below = upper - SLACK * abs(upper) if upper < inf else inf
    if lower > below:
        return None
    if len(problem) <= SMALL:
        path, proven = best_path(problem, chains, below, clock)
        if path is None and not proven:
            raise OutOfTime
        if path is None:
            return None
        load = max(problem.loads(path))
        return Found(path, load, load if proven else min(lower, load))
    if upper < inf:
        # Most chains that are to beat another one do not: a single refusal tells, and no good chain is needed for it.
        rough = problem.under(upper).test(below, clock)
        return None if rough is None else _by_thresholds(problem, clock, rough, lower)
    rough = best_line(problem, chains)
    # Where the dense solver cannot take a line, because it is long, thresholds on the line do.
    if rough is None and len(problem) > len(chains.blocks) + 1:
        order = first_order(chains)
        on_line = problem.restricted(order)
        line = _by_thresholds(on_line, Clock(), None, on_line.lower_bound())
        rough = None if line is None else [(order[state], move) for state, move in line.path]
    return _by_thresholds(problem, clock, rough, lower)


def _by_thresholds(problem: Problem, clock: Clock, best: Path | None, lower: float) -> Found | None:
    """Return the best chain by tests of thresholds; `best` is a good chain, if one is known, and none beats `lower`."""
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


def find_any(problem: Problem, chains: Antichains, clock: Clock) -> Path | None:
    """Return a chain that fits, however slow, or None where there is none; raises OutOfTime."""
    if len(problem) > SMALL:
        return problem.test(ANYTHING, clock)
    path, proven = best_path(problem, chains, clock=clock)
    if path is None and not proven:
        raise OutOfTime
    return path


def may_fit(problem: Problem, chains: Antichains, clock: Clock) -> bool:
    """Return whether a chain may fit into memory, by the sums alone, which are never above what a stage holds.

    In a large lattice this takes a part of what a search for a fast chain takes. Raises OutOfTime.
    """
    if len(problem) <= SMALL:
        return True
    return problem.for_excess().test(HALF_A_BYTE, clock) is not None


def _climb(problem: Problem, lower: float, clock: Clock) -> Path | None:
    """Return a chain not far from the best: thresholds rise until one allows a chain, as low ones are cheap to test."""
    # Under limits of memory there may be no chain at all, and tests are dear: few thresholds come before all loads.
    times, step = (16, 0.04) if np.isfinite(problem.capacity).any() else (4, 0.01)
    while True:
        threshold = lower * (1 + step) if lower > 0 and step < 1e4 else ANYTHING
        found = problem.test(threshold, clock)
        if found is not None or threshold == ANYTHING:
            return found
        step *= times
