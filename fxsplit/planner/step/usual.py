"""Plans with the smallest bottleneck: good ones to begin from, so that no plan for the step is slower than these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import isfinite

from fxsplit.errors import PlanError, ScheduleError
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import Plan
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.solve import Task, search
from fxsplit.planner.step.bound import Line, Stage
from fxsplit.planner.step.plans import price_chain_plan, state_order
from fxsplit.planner.step.two_stages import Chain, Family
from fxsplit.schedule.generators.catalogue import FROM_TIMES, Scheduler, generate
from fxsplit.schedule.of_plan import read_times
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.schedule_plan import list_short
from fxsplit.schedule.solver.search import Placement

NAMED: dict[Placement, tuple[str, ...]] = {
    "v": ("ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV"),
    "loop": ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"),
}
"""The named schedules with two stages a device, by where the second stages go."""


def list_usual_lines(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Iterator[Line]:
    """Yield the lines with the smallest bottleneck on all devices, on half of them, and so on."""
    machine, count = task.machine, len(task.machine)
    while count > 1:
        links, late = machine.links[: count - 1], machine.latencies_ms[: count - 1]
        fewer = replace(machine, devices=machine.devices[:count], links=links, latencies_ms=late)
        found = search(replace(task, machine=fewer), chains, states, clock).best
        if found is not None:
            ends = [0, *(end for end, _ in found.path)]
            yield tuple(
                Stage(begin, end, len(move.devices), move.recompute)
                for begin, (end, move) in zip(ends, found.path, strict=False)
            )
        count //= 2


def list_usual_chains(
    task: Task, chains: Antichains, states: States, clock: SearchClock, families: Iterable[Family]
) -> Iterator[tuple[Chain, Plan]]:
    """Yield the chains with the smallest bottleneck under the named schedules of these families.

    Each comes with a plan that has its order of work and its step, and fits in memory.
    """
    limited = isfinite(task.machine.devices[0].memory_bytes)
    for placement, k in families:
        known: tuple[Chain, tuple[bool, ...]] | None = None
        for name in NAMED[placement]:
            # Some schedules take only certain numbers of microbatches, or hold too many.
            with suppress(ScheduleError, PlanError):
                # Without a limit of memory all schedules of a family have the same chain.
                if known is None or limited:
                    known = _find_usual_chain(task, chains, states, clock, name, (placement, k))
                if known is None:
                    continue
                plan = price_chain_plan(task, chains, *known)
                for made in _generate(name, k, plan):
                    found = state_order(task, plan, made)
                    if found.machine is not None and not list_short(found, found.machine):
                        yield known[0], found


def _find_usual_chain(
    task: Task, chains: Antichains, states: States, clock: SearchClock, name: str, family: Family
) -> tuple[Chain, tuple[bool, ...]] | None:
    """Return the chain with the smallest bottleneck under a named schedule, and which stages recompute; or None."""
    placement, k = family
    machine, workload = Scheduler(name, k).lay_out(task.machine, task.workload.n_microbatches)
    options = replace(task.options, objective="bottleneck", model="forwarded", use_all=True)
    workload = replace(workload, recompute=task.workload.recompute)
    found = search(replace(task, machine=machine, workload=workload, options=options), chains, states, clock).best
    if found is None or len(found.path) != 2 * k:
        return None
    return Chain(placement, tuple(end for end, _ in found.path)), tuple(move.recompute for _, move in found.path)


def _generate(name: str, k: int, plan: Plan) -> Iterator[Schedule]:
    """Yield the named schedules of a plan on k devices: for equal times, and for its own if the schedule has them."""
    made = generate(name, k, plan.n_microbatches)
    yield made
    if name in FROM_TIMES:
        yield generate(name, k, plan.n_microbatches, None, read_times(plan, made))
