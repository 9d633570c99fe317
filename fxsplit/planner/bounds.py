"""Bounds: a load that no chain of stages beats, from levels of work alone, whichever ideals there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.antichains import Levels
from fxsplit.planner.problem import Problem

Floats = NDArray[np.float64]
MOST_MOVES = 2000
"""More moves than these are not worth a better bound: each is looked at in every step."""
STEPS = 30


def level_bound(problem: Problem, levels: Levels, upper: float) -> float:
    """Return the largest load, below `upper`, of which levels say that no chain of stages is as fast.

    A chain is a walk through levels whose every stage does no more work than there is time for, after what its cuts
    send at least. Under a threshold only the most work done so far matters, per configuration and level.
    """
    lower = problem.lower_bound()
    if len(problem.moves.moves) > MOST_MOVES or not 0 < lower < upper < np.inf:
        return lower
    if not _possible(problem, levels, upper * (1 - 1e-9)):
        return upper
    for _ in range(STEPS):
        middle = (lower + upper) / 2
        if _possible(problem, levels, middle):
            upper = middle
        else:
            lower = middle
    return lower * (1 - 1e-9)


def _possible(problem: Problem, levels: Levels, threshold: float) -> bool:
    """Return whether a walk through the levels exists whose every stage has load <= threshold."""
    total = problem.work[-1] * (1 - 1e-9)
    overlapped = bool(np.isfinite(problem.start_floor).any())
    most = np.full((len(problem.moves.used), levels.low.size), -np.inf)
    for move, kind in zip(problem.moves.moves, problem.kind, strict=True):
        speed, receive, send = problem.rates[kind]
        begin = 0.0 if move.source == 0 else _after(most[move.source], levels, receive, speed, threshold, overlapped)
        if begin == -np.inf:
            continue
        if move.target in problem.moves.final and begin + float(_done(speed, np.array(threshold))) >= total:
            return True
        out = _priced(levels.least_bytes, send)
        time = threshold if overlapped else threshold - out
        end = np.minimum(begin + _done(speed, np.where(out <= threshold, time, -np.inf)), levels.high)
        most[move.target] = np.maximum(most[move.target], np.where(end >= levels.low, end, -np.inf))
    return False


def _after(most: Floats, levels: Levels, receive: float, speed: float, threshold: float, overlapped: bool) -> float:
    """Return the most work done before a stage, less what it could do in the time that receiving takes it."""
    cost = _priced(levels.least_bytes, receive)
    if overlapped:
        return float(most[cost <= threshold].max(initial=-np.inf))
    able = cost <= threshold
    if np.isinf(speed):  # it makes up for any time that it waits
        return float(most[able].max(initial=-np.inf))
    return float((most[able] - speed * cost[able]).max(initial=-np.inf))


def _done(speed: float, time: Floats) -> Floats:
    """Return the work done in a time; none where there is none, or less."""
    if np.isinf(speed):
        return np.where(time >= 0, np.inf, -np.inf)
    return np.where(time >= 0, speed * np.maximum(time, 0.0), -np.inf)


def _priced(least_bytes: Floats, ms_per_byte: float) -> Floats:
    """Return the time that a level's least bytes take, infinite where no ideal is."""
    return np.where(np.isinf(least_bytes), np.inf, np.where(np.isinf(least_bytes), 0.0, least_bytes) * ms_per_byte)
