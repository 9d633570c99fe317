"""The partitioner's search: the smallest threshold under which a chain of stages exists, with its proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from fxsplit import kernels
from fxsplit.antichains import Antichains
from fxsplit.errors import PlanError
from fxsplit.machine import Machine
from fxsplit.plan import WEIGHT_COPIES, size
from fxsplit.states import FEATURES, States
from fxsplit.workload import Workload

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SLACK = 1e-9
"""Relative distance below which two loads count as equal: thresholds are compared in floating point."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One search: states, and for every stage how load and memory follow from where it starts and ends.

    `load` and `memory` are float64 [stages, 3, features]: the coefficients of a stage's end, its start, and the part
    of its end that only grows; load(J, I) = end(I) - start(J). `capacity` is float64 [stages]; `allowed` is bool
    [stages + 1, states]. `work` is float64 [states], each state's share of what is to be done, and `speed` float64
    [stages] how much of it a stage does per unit of load (infinite where load does not follow from work).
    `may_idle` allows empty stages.
    """

    features: Floats
    in_pointer: NDArray[np.int32]
    in_from: NDArray[np.int32]
    load: Floats
    memory: Floats
    capacity: Floats
    allowed: Bools
    work: Floats
    speed: Floats
    may_idle: bool = False

    @property
    def n_stages(self) -> int:
        """How many stages the chain has."""
        return int(self.load.shape[0])

    def test(self, threshold: float) -> tuple[list[int] | None, float]:
        """Return a chain of states whose every stage has load <= threshold, or None and the next possible threshold."""
        later = np.append(np.cumsum(self.speed[:0:-1])[::-1], 0.0)
        choice, following = kernels.reach(
            in_ptr=self.in_pointer,
            in_from=self.in_from,
            features=self.features,
            load=self.load,
            memory=self.memory,
            capacity=self.capacity,
            allowed=self.allowed,
            work=self.work,
            later=later,
            threshold=threshold,
            may_idle=self.may_idle,
        )
        at = self.features.shape[0] - 1
        if choice[-1, at] < 0:
            return None, following
        cuts = [at]
        for stage in reversed(range(self.n_stages)):
            at = int(choice[stage, at])
            cuts.append(at)
        return cuts[::-1], following

    def loads(self, cuts: list[int], which: Floats | None = None) -> list[float]:
        """Return every stage's load (or another linear cost, such as `memory`) in a chain of states."""
        weight = self.load if which is None else which
        f = self.features
        return [float(f[cuts[s + 1]] @ weight[s, 0] - f[cuts[s]] @ weight[s, 1]) for s in range(self.n_stages)]


def pose(
    states: States,
    chains: Antichains,
    machine: Machine,
    workload: Workload,
    n_stages: int,
    optimizer_factor: float,
    pinned: Mapping[str, int],
) -> Problem:
    """Return the problem of cutting `states` into `n_stages` stages, stage i on device i (the formulas of `price`)."""
    load = np.zeros((n_stages, 3, len(FEATURES)))
    memory = np.zeros((n_stages, 3, len(FEATURES)))
    time = [FEATURES.index("forward_ms"), FEATURES.index("backward_ms")]
    moved = [FEATURES.index("live_bytes"), FEATURES.index("live_gradient_bytes")]
    parameters, buffers = FEATURES.index("parameter_bytes"), FEATURES.index("buffer_bytes")
    kept, live = FEATURES.index("kept_bytes"), FEATURES.index("live_bytes")
    for stage in range(n_stages):
        load[stage][:, time] = 1.0 / machine.devices[stage].speed
        if stage + 1 < n_stages:
            load[stage, 0, moved] = 1.0 / machine.bytes_per_ms(stage)
        if stage > 0:
            load[stage, 1, moved] = -1.0 / machine.bytes_per_ms(stage - 1)
        in_flight = workload.in_flight[n_stages][stage]
        memory[stage][:, [parameters, buffers, kept]] = [WEIGHT_COPIES + optimizer_factor, 1.0, in_flight]
        memory[stage, 0, live], memory[stage, 1, live] = in_flight, -in_flight
    capacity = np.array([d.memory_bytes for d in machine.devices[:n_stages]], np.float64)
    allowed = _allowed(chains, pinned, n_stages)
    work = states.column("forward_ms") + states.column("backward_ms")
    speed = np.array([d.speed for d in machine.devices[:n_stages]], np.float64)
    s, idle = states, workload.may_idle
    return Problem(s.features, s.in_pointer, s.in_from, load, memory, capacity, allowed, work, speed, idle)


def minimise(problem: Problem, bound: float) -> list[int] | None:
    """Return the chain of states whose slowest stage is fastest, or None when no chain fits; `bound` is below it.

    Climbs from the bound in growing steps, because a test is the quicker the less its threshold allows. Then bisects,
    and once close asks in turn for anything strictly better than the best chain so far. Each refusal tells the
    smallest threshold that could succeed, so the search ends with a proof.
    """
    best, lower, step = None, bound, 0.01
    while best is None:
        threshold = lower * (1 + step) if 0 < step * lower < inf and step < 1e4 else inf
        best, following = problem.test(threshold)
        if best is None and threshold == inf:
            return None
        lower, step = (lower, step) if best else (max(lower, following), 4 * step)
    upper = max(problem.loads(best))
    bisect = True
    while upper - lower > SLACK * upper:
        close = upper - lower < 0.02 * upper
        threshold = (lower + upper) / 2 if bisect or not close else upper * (1 - SLACK)
        bisect = not bisect
        found, following = problem.test(threshold)
        if found is None:
            lower = max(lower, min(following, upper))
        else:
            best, upper = found, min(upper, max(problem.loads(found)))
    return best


def lower_bound(problem: Problem) -> float:
    """Return a load that no chain's slowest stage can beat: all work shared evenly, or one edge's work alone."""
    work, speed = problem.work, problem.speed
    end = np.repeat(np.arange(work.size), np.diff(problem.in_pointer))
    largest = float((work[end] - work[problem.in_from]).max(initial=0.0))
    return max(float(work[-1] / speed.sum()), largest / float(speed.max()))


def misfit(problem: Problem, machine: Machine) -> PlanError:
    """Return the error that says why no chain exists: contradictory pins, or how much memory is missing and where."""
    n_stages = problem.n_stages
    unlimited = replace(problem, capacity=np.full(n_stages, inf))
    if unlimited.test(inf)[0] is None:
        return PlanError(
            f"no plan of {n_stages} stages satisfies the pins: some pinned node depends on one that is pinned to a "
            "later stage, or a stage would stay empty; pin fewer submodules or use fewer devices"
        )
    # The same search with another objective: the smallest excess over the devices' memory, a constant per stage.
    ones = np.column_stack([problem.features, np.ones(problem.features.shape[0])])
    excess = np.concatenate([problem.memory, np.zeros((n_stages, 3, 1))], axis=2)
    finite = np.isfinite(problem.capacity)
    excess[~finite] = 0.0
    excess[finite, 0, -1] = excess[finite, 2, -1] = -problem.capacity[finite]
    boundless = np.full(n_stages, inf)
    relaxed = replace(unlimited, features=ones, load=excess, memory=np.zeros_like(excess), speed=boundless)
    cuts = minimise(relaxed, 0.0)
    assert cuts is not None
    loads = relaxed.loads(cuts)
    worst = int(np.argmax(loads))
    device = machine.devices[worst]
    need = device.memory_bytes + loads[worst]
    return PlanError(
        f"no plan fits in memory: even the best leaves stage {worst} of {n_stages} on {device.name} short by "
        f"{size(loads[worst])} ({loads[worst]:.0f} bytes): it needs {size(need)} of {size(device.memory_bytes)}; use "
        "more devices, more and smaller microbatches, schedule='1F1B', or partition{optimizer_factor=} if your "
        "optimizer keeps less than Adam"
    )


def _allowed(chains: Antichains, pinned: Mapping[str, int], n_stages: int) -> Bools:
    """Return where a chain may be cut: the full state only at the end, and every pinned block on its own side."""
    allowed = np.ones((n_stages + 1, len(chains)), np.bool_)
    allowed[n_stages, :-1] = False
    if not pinned:
        return allowed
    stage_of: dict[int, int] = {}
    for name, stage in pinned.items():
        if not 0 <= stage < n_stages:
            raise PlanError(f"{name!r} is pinned to stage {stage}, and the plan has stages 0 to {n_stages - 1}")
        block = chains.blocks.home[name]
        if stage_of.setdefault(block, stage) != stage:
            raise PlanError(
                f"{name!r} is pinned to stage {stage}, but it must stay together with a node pinned to stage "
                f"{stage_of[block]} (they share memory or parameters): pin both to one stage"
            )
    weight = np.zeros((len(chains.blocks), 2 * (n_stages + 1)))
    for block, stage in stage_of.items():
        for boundary in range(n_stages + 1):
            weight[block, 2 * boundary + (stage >= boundary)] = 1.0
    inside = kernels.prefix_sums(chains.parent, chains.last, weight)
    for boundary in range(n_stages + 1):
        earlier, later = inside[:, 2 * boundary], inside[:, 2 * boundary + 1]
        allowed[boundary] &= (earlier == weight[:, 2 * boundary].sum()) & (later == 0)
    return allowed
