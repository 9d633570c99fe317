"""The solver for small graphs: all pairs of states at once, in numpy, without compiling.

Up to about 600 ideals it takes half the time of the kernels in plain Python (5.7 ms against 12 for ResNet-50 on 8
devices), and importing numba would take a second. In a process with compiled kernels, the same loops compiled are twice
as fast again. For large graphs it solves the chains of two topological orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.planner import kernels
from fxsplit.planner.clock import OutOfTime, SearchClock
from fxsplit.planner.kernels import SMALL
from fxsplit.planner.kernels.dense import best_chains
from fxsplit.planner.kernels.separable import SLACK
from fxsplit.planner.problem.problem import Path, Problem
from fxsplit.system.kernels import compile_kernel

Bools = NDArray[np.bool_]
Ints = NDArray[np.int32]


def membership(chains: Antichains, states: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the blocks of each state as float32 [states, blocks], 0 or 1."""
    inside = np.zeros((states.size, len(chains.blocks)), np.float32)
    row_of = {int(state): row for row, state in enumerate(states)}
    for row, state in enumerate(states):
        # Most states extend, by one block, a state in a row above.
        known = row_of.get(int(chains.parent[state]))
        if known is not None and known < row:
            inside[row] = inside[known]
            inside[row, chains.last[state]] = 1.0
        else:
            inside[row, chains.ideal(int(state))] = 1.0
    return inside


@lru_cache(maxsize=8)  # one lattice serves many machines; the lattices here are small
def contained(chains: Antichains) -> Bools:
    """Return whether one state lies strictly inside another, as bool [smaller, larger]."""
    # Compare eight bytes at a time: J lies inside I if no bit of J is missing in I.
    inside = membership(chains, np.arange(len(chains))) > 0
    packed = np.packbits(inside, axis=1)
    words = np.zeros((len(chains), -(-packed.shape[1] // 8) * 8), np.uint8)
    words[:, : packed.shape[1]] = packed
    sets = words.view(np.uint64)
    strictly: Bools = np.ones((len(chains), len(chains)), np.bool_)
    for word in sets.T:
        strictly &= (word[:, None] & ~word[None, :]) == 0
    np.fill_diagonal(strictly, False)
    return strictly


def best_path(
    problem: Problem, chains: Antichains, upper: float = inf, clock: SearchClock | None = None
) -> tuple[Path | None, bool]:
    """Return the chain with the smallest bottleneck (None if none is below `upper` ms), and whether it is proven.

    First solve the chains of one topological order. Their best load excludes many states: states with too much work for
    the devices before them, and states that leave too much work for the devices after them.
    """
    line = first_order(chains)
    # With tensor prices near the optimal load, sums lose fewer digits.
    problem = problem.under(upper)
    rough = _on_line(problem, line, upper)
    if rough is not None:
        upper = max(problem.loads(rough))
        closer = problem.under(upper)
        if closer is not problem:
            rough = _on_line(closer, line, upper) or rough
            problem, upper = closer, max(problem.loads(rough))
    # If the graph is a chain, its only topological order contains all states.
    if len(chains) == len(chains.blocks) + 1:
        return rough, True
    try:
        return _solve_fitting(
            problem, contained(chains), np.arange(len(problem)), upper, clock or SearchClock()
        ) or rough, True
    except OutOfTime:
        return rough, False


def best_line(problem: Problem, chains: Antichains) -> Path | None:
    """Return the best chain in two topological orders, or None if none fits or the lines are too long."""
    if len(chains.blocks) >= SMALL:
        return None
    found = [_on_line(problem, line, inf) for line in (first_order(chains), _narrow_order(problem, chains))]
    return min((path for path in found if path), key=lambda path: max(problem.loads(path)), default=None)


def _on_line(problem: Problem, line: list[int], upper: float) -> Path | None:
    """Return the best chain among nested states."""
    # An even split bounds the load of the best chain, which excludes most pairs.
    states, below = np.array(line, np.int64), np.tri(len(line), k=-1, dtype=np.bool_).T
    upper = min(upper, float(np.nextafter(_even(problem, states) * SLACK, inf)))
    return _solve_fitting(problem.under(upper), below, states, upper, SearchClock())


def _even(problem: Problem, line: NDArray[np.int64]) -> float:
    """Return the load in ms of the slowest stage if a line of states is cut so that all devices do about equal work.

    line: the numbers of states, each with more nodes than the one before: the places where stages may end. The result
        is infinite if memory or pins might forbid that split, or if the line is shorter than the devices are many.
    """
    path: Path = []
    # For each configuration, the first move with a stage that leaves it.
    moves = {m.source: m for m in reversed(problem.moves.moves) if m.devices}
    steps = [0]
    while steps[-1] in moves:
        steps.append(moves[steps[-1]].target)
    count = len(steps) - 1
    if steps[-1] not in problem.moves.final or count >= line.size or np.isfinite(problem.tables.capacity).any():
        return inf
    work = problem.tables.work[line]
    cut = 0
    for stage, config in enumerate(steps[:-1], 1):
        nearest = int(np.abs(work - work[-1] * stage / count).argmin())
        cut = line.size - 1 if stage == count else min(max(nearest, cut + 1), line.size - 1 - count + stage)
        if not problem.tables.allowed[moves[config].target, line[cut]]:
            return inf
        path.append((int(line[cut]), moves[config]))
    return max(problem.loads(path))


def line_of(chains: Antichains, order: Sequence[int]) -> Antichains:
    """Return the lattice of only the states in `order`, each with one block more than the state before."""
    at = np.array(order, np.int64)
    n = at.size
    before = np.arange(-1, n - 1, dtype=np.int32)
    return replace(
        chains,
        parent=before,
        last=chains.last[at],
        pointer=np.minimum(np.arange(n + 1), n - 1).astype(np.int32),
        node=chains.last[at[1:]],
        child=np.arange(1, n, dtype=np.int32),
        live_bytes=chains.live_bytes[at],
        live_gradient_bytes=chains.live_gradient_bytes[at],
        sent_bytes=chains.sent_bytes[at],
    )


@lru_cache(maxsize=8)
def first_order(chains: Antichains) -> list[int]:
    """Return the states of the order of block numbers: the ideals {}, {0}, {0, 1} and so on."""
    states, at = [], len(chains) - 1
    while at >= 0:
        states.append(at)
        at = int(chains.parent[at])
    return states[::-1]


def _narrow_order(problem: Problem, chains: Antichains) -> list[int]:
    """Return the states of a greedy topological order: each step adds the block that leaves the fewest bytes live."""
    live = problem.live
    states, at = [0], 0
    while at < len(chains) - 1:
        above = chains.child[chains.pointer[at] : chains.pointer[at + 1]]
        at = int(above[live[above].argmin()])
        states.append(at)
    return states


def _solve_fitting(
    problem: Problem, below: Bools, states: NDArray[np.int64], upper: float, clock: SearchClock
) -> Path | None:
    """Return the best chain among `states` with a load below `upper` ms whose stages all fit, to the byte."""
    while True:
        path = _solve(problem, below, states, upper, clock)
        if path is None or problem.fits(path):
            return path


def _solve(problem: Problem, below: Bools, states: NDArray[np.int64], upper: float, clock: SearchClock) -> Path | None:
    """Return the best chain among `states` with a load below `upper` ms, by the dynamic programme of PipeDream.

        best(q, I) = min over moves (p -> q) and states J inside I of max(best(p, J), load(J, I))

    The original (Narayanan et al. 2019) runs over positions in a line.
    """
    t = problem.tables
    if t.may_idle:
        below = below | np.eye(states.size, dtype=np.bool_)
    n, count = states.size, len(problem.moves.used)
    # The compiled loops count no steps, so they cannot stop at a deadline.
    if kernels.worth_compiling(n) and clock.deadline == inf:
        return _solve_compiled(problem, below, states, upper)
    best = np.full((count, n), inf)
    best[0, 0] = -inf
    origin, via = (np.full((count, len(problem)), -1, np.int32) for _ in range(2))
    origin[0, 0] = 0
    work, costs = t.work[states], problem.pair_costs(states)
    for m, move in enumerate(problem.moves.moves):
        clock.check()
        if not move.devices:
            idle = (best[move.source] < best[move.target]) & t.allowed[move.target][states]
            best[move.target][idle] = best[move.source][idle]
            origin[move.target][states[idle]], via[move.target][states[idle]] = states[idle], m
            continue
        starts = np.flatnonzero(best[move.source] < upper)
        ends = np.flatnonzero(t.allowed[move.target][states])
        # Exclude starts that leave too much work, and ends with too much work for the used devices.
        if upper < inf:
            starts = starts[work[-1] - work[starts] <= upper * t.left[move.source] * SLACK]
            least = work[-1] - upper * t.left[move.target] * SLACK
            most = upper * t.done[move.target] * SLACK
            ends = ends[(work[ends] >= least) & (work[ends] <= most)]
        if not starts.size or not ends.size:
            continue
        load, fits = costs(problem.kind[m], starts, ends)
        load = np.where(below[np.ix_(starts, ends)] & fits, np.maximum(load, best[move.source][starts, None]), inf)
        where = load.argmin(axis=0)
        value = load[where, np.arange(ends.size)]
        better = (value < best[move.target][ends]) & (value < upper)
        best[move.target][ends[better]] = value[better]
        origin[move.target][states[ends[better]]] = states[starts[where[better]]]
        via[move.target][states[ends[better]]] = m
    return _best_end(problem, best, origin, via)


def _solve_compiled(problem: Problem, below: Bools, states: NDArray[np.int64], upper: float) -> Path | None:
    """Like `_solve`, in machine code."""
    whole = states.size == len(problem)
    tables = problem.list_tables(None if whole else states)
    best, origin, via = compile_kernel(best_chains)(
        tables, below, problem.needs(states), *problem.shared(states), upper
    )
    # The kernel numbers states by their position in `states`.
    if not whole:
        origins, vias = (np.full((best.shape[0], len(problem)), -1, np.int32) for _ in range(2))
        origins[:, states], vias[:, states] = np.where(origin >= 0, states[origin], -1), via
        origin, via = origins, vias
    return _best_end(problem, best, origin, via)


def _best_end(problem: Problem, best: NDArray[np.float64], origin: Ints, via: Ints) -> Path | None:
    """Return the stages of the fastest plan, or None if there is none.

    A plan may end in several configurations (sets of used devices). best: the slowest load of the best division of each
    state in each configuration. origin, via: the state at which its last stage begins, and the move, as
    `Problem.trace` takes them.
    """
    final = min(sorted(problem.moves.final), key=lambda q: best[q, -1])
    if best[final, -1] == inf:
        return None
    # `trace` takes the first final configuration with a chain: remove all but the best.
    for q in problem.moves.final - {final}:
        origin[q, -1] = -1
    return problem.trace(origin, via)
