"""Bounds: a load that no chain of stages beats, computed from work levels without enumerating ideals.

For graphs with too many ideals. The levels (see cuts.py) give the fewest bytes over a cut, by the work before the cut.
A threshold is refuted if even the cheapest cuts of all levels leave too little time for the work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.lattice.antichains import Levels
from fxsplit.planner.kernels.tables import IDLE
from fxsplit.planner.problem.problem import Problem

Floats = NDArray[np.float64]
MOST_MOVES = 2000
"""With more moves, a better bound is not worth its time: each step iterates over all moves."""
STEPS = 30
"""The number of bisections. Each halves the distance to the best bound that levels can prove."""


def level_bound(problem: Problem, levels: Levels, upper: float) -> float:
    """Return the largest load in ms, at most `upper`, that provably no chain of stages beats.

    A chain of stages is a walk through the levels. Under a threshold, a stage does no more work than its devices can do
    in the time that remains after receiving and sending the fewest bytes of its two levels.
    """
    lower = problem.lower_bound()
    if len(problem.moves.moves) > MOST_MOVES or not 0 < lower < upper < np.inf:
        return lower
    # If even `upper` admits no walk, the plan in hand is optimal.
    if not _possible(problem, levels, upper * (1 - 1e-9)):
        return upper
    # Bisect: a refuted threshold is a proven bound; an admitted threshold proves nothing.
    for _ in range(STEPS):
        middle = (lower + upper) / 2
        if _possible(problem, levels, middle):
            upper = middle
        else:
            lower = middle
    return lower * (1 - 1e-9)


def _possible(problem: Problem, levels: Levels, threshold: float) -> bool:
    """Return whether a walk through the levels exists in which every stage has load <= threshold."""
    total = problem.tables.work[-1] * (1 - 1e-9)
    # Overlapped transfers add no time to the work, but each must take at most the threshold.
    overlapped = bool(np.isfinite(problem.tables.start_floor).any())
    # More completed work is never worse: keep the maximum for each configuration and level.
    most = np.full((len(problem.moves.used), levels.low.size), -np.inf)
    # Configurations in which every used device is idle, so that no stage exists yet.
    empty = {0}
    for move, kind in zip(problem.moves.moves, problem.kind, strict=True):
        if kind == IDLE:
            most[move.target] = np.maximum(most[move.target], most[move.source])
            empty |= {move.target} if move.source in empty else set()
            continue
        speed, receive, send = problem.rates[kind]
        begin = _after(most[move.source], levels, receive, speed, threshold, overlapped)
        begin = max(begin, 0.0) if move.source in empty else begin
        if begin == -np.inf:
            continue
        # The last stage sends nothing, and must finish all remaining work.
        if move.target in problem.moves.final and begin + float(_done(speed, np.array(threshold))) >= total:
            return True
        out = _priced(levels.least_bytes, send)
        time = threshold if overlapped else threshold - out
        end = np.minimum(begin + _done(speed, np.where(out <= threshold, time, -np.inf)), levels.high)
        most[move.target] = np.maximum(most[move.target], np.where(end >= levels.low, end, -np.inf))
    return False


def _after(most: Floats, levels: Levels, receive: float, speed: float, threshold: float, overlapped: bool) -> float:
    """Return the most work before a stage, minus the work its devices could do in the time they need to receive."""
    cost = _priced(levels.least_bytes, receive)
    if overlapped:
        return float(most[cost <= threshold].max(initial=-np.inf))
    able = cost <= threshold
    # An infinite speed (a host of unknown speed) makes up for any waiting time.
    if np.isinf(speed):
        return float(most[able].max(initial=-np.inf))
    return float((most[able] - speed * cost[able]).max(initial=-np.inf))


def _done(speed: float, time: Floats) -> Floats:
    """Return the work done in `time` ms, in ms of a device of speed 1; -inf for a negative time."""
    if np.isinf(speed):
        return np.where(time >= 0, np.inf, -np.inf)
    return np.where(time >= 0, speed * np.maximum(time, 0.0), -np.inf)


def _priced(least_bytes: Floats, ms_per_byte: float) -> Floats:
    """Return the ms for the fewest bytes of each level, infinite for a level without ideals."""
    return np.where(np.isinf(least_bytes), np.inf, np.where(np.isinf(least_bytes), 0.0, least_bytes) * ms_per_byte)
