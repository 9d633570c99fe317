"""The search: the chain of states with the smallest bottleneck, with a proof that no chain is faster.

In a large lattice the search tests one threshold after another: does a chain exist whose stages all have a smaller
load? A found chain lowers the upper bound, a refutation raises the lower bound, and the two meet at the optimum:

    lower |-------x------------------------------------x| upper
                  |                                    just below upper: a refutation proves the best chain optimal
                  LEAP of the way: a refutation raises lower, a chain lowers upper
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import inf

import numpy as np

from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.planner.clock import OutOfTime, SearchClock
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.problem.problem import Path, Problem
from fxsplit.planner.search.dense import best_line, best_path, first_order

SLACK = 1e-9
"""Two loads closer than this relative distance count as equal, because of rounding."""
LEAP = 0.35
"""Where to test between the bounds: nearer to the lower one, since refutations are cheaper than chains."""

HALF_A_BYTE = 0.5
"""The tolerance in bytes between a sum of memory and the capacity of a device."""
ANYTHING = 1e200
"""A threshold above every load. It is finite, since zero times infinity is NaN."""


@dataclass(frozen=True)
class BestChain:
    """The best chain, its bottleneck, and a bound that no chain beats, in ms; both are equal unless time ran out."""

    path: Path
    load: float
    lower: float


def minimise(
    problem: Problem, chains: Antichains, clock: SearchClock | None = None, *, lower: float = 0.0, upper: float = inf
) -> BestChain | None:
    """Return the chain of states with the smallest bottleneck, or None if no chain below `upper` ms fits.

    dense.py solves small lattices over all pairs of states. In a large lattice, first solve the chains of one or two
    topological orders, since their best is often the best of all. Then test thresholds between the lower bound and just
    below the best chain, until the bounds meet. `lower` is a load in ms that no chain beats, known to the caller. When
    time is up, return the best chain so far; raises OutOfTime if there is none.
    """
    clock = clock or SearchClock()
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
        return BestChain(path, load, load if proven else min(lower, load))
    if upper < inf:
        # Most challengers lose, and a single refutation then suffices: do not prepare a good chain first.
        rough = problem.under(upper).test(below, clock)
        return None if rough is None else _by_thresholds(problem, clock, rough, lower)
    rough = best_line(problem, chains)
    # A line too long for the dense solver is solved by thresholds, however short the time is: some plan is to be had.
    if rough is None and len(problem) > len(chains.blocks) + 1:
        order = first_order(chains)
        on_line = problem.restricted(order)
        line = _by_thresholds(on_line, SearchClock(), None, on_line.lower_bound())
        rough = None if line is None else [(order[state], move) for state, move in line.path]
    elif rough is None:
        rough = _climb(problem, lower, SearchClock())
        if rough is None:
            return None
    return _by_thresholds(problem, clock, rough, lower)


def _by_thresholds(problem: Problem, clock: SearchClock, best: Path | None, lower: float) -> BestChain | None:
    """Return the best chain by testing thresholds. `best` is a good chain, if known; no chain beats `lower` ms."""
    best = best or _climb(problem, lower, clock)
    if best is None:
        return None
    upper = max(problem.loads(best))
    closer = problem.under(upper)
    # First test just below the best: if it is the optimum, one refutation proves it.
    bisect = False
    # When time is up, the result is the best chain and the bound so far.
    with suppress(OutOfTime):
        while upper - lower > 2 * SLACK * abs(upper):
            threshold = lower + LEAP * (upper - lower) if bisect else upper - SLACK * abs(upper)
            bisect = not bisect
            found = closer.test(threshold, clock)
            if found is None:
                lower = max(lower, threshold)
                continue
            load = max(problem.loads(found))
            # The sums in the test have lost more digits than the distance of the bounds.
            if load >= upper:
                break
            best, upper = found, load
    return BestChain(best, upper, min(lower, upper))


def find_any(problem: Problem, chains: Antichains, clock: SearchClock) -> Path | None:
    """Return a chain that fits, of any load, or None if there is none. Raises OutOfTime."""
    if len(problem) > SMALL:
        return problem.test(ANYTHING, clock)
    path, proven = best_path(problem, chains, clock=clock)
    if path is None and not proven:
        raise OutOfTime
    return path


def may_fit(problem: Problem, chains: Antichains, clock: SearchClock) -> bool:
    """Return whether a chain may fit in memory by the sums over states, which never exceed the true memory of a stage.

    In a large lattice this is much faster than the search for a fast chain. Raises OutOfTime.
    """
    if len(problem) <= SMALL:
        return True
    return problem.for_excess().test(HALF_A_BYTE, clock) is not None


def _climb(problem: Problem, lower: float, clock: SearchClock) -> Path | None:
    """Raise the threshold from `lower` until a chain exists, and return the chain, or None if no chain fits.

    Low thresholds are cheap to test, and the first chain from below is near the best.
    """
    # With memory limits there may be no chain, and tests are expensive: take few steps before ANYTHING.
    times, step = (16, 0.04) if np.isfinite(problem.capacity).any() else (4, 0.01)
    while True:
        threshold = lower * (1 + step) if lower > 0 and step < 1e4 else ANYTHING
        found = problem.test(threshold, clock)
        if found is not None or threshold == ANYTHING:
            return found
        step *= times
