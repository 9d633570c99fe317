"""From a planning task to the plan with the shortest step, with its schedule and its lower bound.

The search judges lines by list schedules. Here the best lines become plans, priced by definition, and each plan's step
is simulated: the search's own figures decide nothing. Lines without replicas also get the schedule that
`schedule.search` finds for their times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from operator import itemgetter

from fxsplit.errors import NoFit, PlanError, ScheduleError
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import PROVEN, Plan
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.solve import Task
from fxsplit.planner.step.bound import Line
from fxsplit.planner.step.chain_search import ChainSearch
from fxsplit.planner.step.kernels import compile_kernels
from fxsplit.planner.step.kernels.arrays import Levels, Prices
from fxsplit.planner.step.kernels.search import NEVER
from fxsplit.planner.step.plans import price_chain_plan, price_plan, state_order, write_schedule
from fxsplit.planner.step.prices import price_ideals, sort_into_levels
from fxsplit.planner.step.search import CLOSE, LEVELS, LineSearch, list_neighbours
from fxsplit.planner.step.two_stages import PLACEMENTS, Chain, ChainBound
from fxsplit.planner.step.usual import list_usual_chains, list_usual_lines
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.generators.synchronous import REPLICABLE, count_in_flight, schedule_replicas
from fxsplit.schedule.of_plan import build_schedule
from fxsplit.schedule.schedule_plan import fits, list_limits, list_short, search_for_plan, simulate_step
from fxsplit.schedule.solver.search import warm_up

SIMULATED = 12
"""How many of the best lines are simulated: under a schedule that is stated, or if memory is limited."""
ATTEMPTS = 6
"""How often a list schedule is made again for less room, if actions need more memory than sums over ideals say."""
SIMPLE = ("1F1B", "ZB-H1", "GPipe")
"""Schedules that are taken instead of a searched order, if they are as fast."""
BY_STEP, BY_BOUND, SHORT_S = 8, 8, 0.15
"""For how many lines and chains an order is searched: the best by their steps and by their bounds; and for how many
seconds."""
SAME = 1e-9
"""Steps that differ by this share are the same: they are sums in another order."""
TWICE = 2
"""How many of these are searched again, for the time that is left."""
FIRST_S, WHOLE_S = 1.2, 2.2
"""After so many seconds of processor time the first searches for orders end, and the longer ones, without compiling."""
SCHEDULES = (SEARCH, *REPLICABLE)
"""The schedules that this search plans for: a free order of work, and the named schedules that replicas can run."""
MODELS = ("forwarded", "replicated")
"""The cost models with a step that the bound is for: both devices are busy while a value crosses a cut."""


def plan_step(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Plan:
    """Return the plan with the shortest step, and a lower bound over all of them.

    The number of microbatches and the schedule are the workload's: "search" leaves the order of work free, and whether
    devices have one stage or two. If they have two, the plan's machine is unrolled. With one stage a device, stages
    have replicas if the cost model is `replicated`. Each stage stays within its device's memory at every moment. Raises
    NoFit if no plan that does was found, and PlanError for a task that this search cannot solve.
    """
    # A model that is planned again may have an unrolled machine.
    task = replace(task, machine=task.machine.rolled())
    _check(task)
    compile_kernels()
    if isfinite(task.machine.devices[0].memory_bytes):
        # Often memory is ample. A search that looks at memory takes several times as long, so first try without.
        plan = _plan(replace(task, machine=task.machine.lift_memory_limits()), chains, states, clock)
        machine = task.machine.unrolled(plan.machine.homes) if plan.machine and plan.machine.homes else task.machine
        if not list_short(plan, machine):
            return plan.attach(task.costs, machine)
    return _plan(task, chains, states, clock)


def _plan(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Plan:
    """Return the plan with the shortest step within the memory of the task's machine."""
    machine, m = task.machine, task.workload.n_microbatches
    prices = price_ideals(task.costs, chains, machine, task.options.costs)
    most_replicas = len(machine) if task.options.model == "replicated" else 1
    lines = LineSearch(prices, list_neighbours(chains), len(machine), m, most_replicas, task.recompute)
    if isfinite(machine.devices[0].memory_bytes):
        lines.measure = partial(_measure, task, chains, lines)
    whole = chains.complete and chains.slack is None
    lines.run(list_usual_lines(task, chains, states, clock), clock.deadline, whole=whole)
    best = min(_list_plans(task, chains, lines), key=_read_step, default=None)
    if task.workload.schedule == SEARCH:
        found, best = _search_chains(task, chains, states, lines, best, clock)
        if best is None or _read_step(best) > min(lines.bound, found.bound.least(_read_step(best))) * (1 + CLOSE):
            best = _search_orders(task, chains, lines, found, best, clock.deadline)
    if best is None:
        # If two stages fit half of a device each, one stage with the nodes of both fits the device.
        raise _explain_misfit(proven=lines.bound >= NEVER)
    step = _read_step(best)
    lines.prove(step)
    low = min(lines.bound, step)
    if task.workload.schedule == SEARCH:
        low = min(low, found.bound.prove(step))
    return replace(best, step_lower_bound_ms=low).prove("bound" if low < step else "search")


def _measure(task: Task, chains: Antichains, lines: LineSearch, line: Line) -> float:
    """Return the step of the best plan of a line that fits in memory, in ms; NEVER if none was found."""
    return min(map(_read_step, _plan_line(task, chains, lines, line)), default=NEVER)


def _explain_misfit(*, proven: bool) -> NoFit:
    """Return the error for a task without a plan that fits, which says whether none exists."""
    found = "no plan was found that fits in memory, and there may be one"
    return NoFit(
        f"{'no plan fits in memory, in any order of work' if proven else found}: use more devices, more and smaller "
        "microbatches, or partition{optimizer_factor=} if your optimizer keeps less than Adam; the plan with the "
        "smallest bottleneck (objective='bottleneck') may recompute, and says which stage is short of memory",
        proven=proven,
    )


def _list_plans(task: Task, chains: Antichains, lines: LineSearch) -> Iterator[Plan]:
    """Yield plans of the best lines that fit in memory, and of the usual lines, each with its step."""
    name, limited = task.workload.schedule, isfinite(task.machine.devices[0].memory_bytes)
    ranked = lines.rank()[: SIMULATED if limited or name != SEARCH else 1]
    for line in dict.fromkeys([*ranked, *(lines.usual if limited else ())]):
        yield from _plan_line(task, chains, lines, line)


def _plan_line(task: Task, chains: Antichains, lines: LineSearch, line: Line) -> list[Plan]:
    """Return plans of a line that fit in memory, each with its step.

    If the order of work is free, a line runs under its best list schedule, or under a named one if that is as fast:
    1F1B and ZB-H1 hold fewer microbatches, and 1F1B divides no backward.
    """
    plan = price_plan(task, chains, line)
    if task.workload.schedule != SEARCH:
        return _schedule_by_name(task, plan, task.workload.schedule)
    listed = _fit(task, plan, line, lines)
    step = min(map(_read_step, listed), default=inf)
    simple = [found for each in SIMPLE for found in _schedule_by_name(task, plan, each)]
    return [found for found in simple if _read_step(found) <= step * (1 + SAME)] or listed


def _fit(task: Task, plan: Plan, line: Line, lines: LineSearch) -> list[Plan]:
    """Return the plan of a line with a list schedule that fits in memory, or [] if none was found."""
    fewer = [0] * len(line)
    for _ in range(ATTEMPTS):
        actions = lines.list_actions(line, fewer)
        if not actions:
            return []
        found = state_order(task, plan, write_schedule(line, lines.m, actions))
        short = list_short(found, task.machine)
        if not short:
            return [found]
        # Sums over ideals leave out what single actions need.
        fewer = [count + (s in short) for s, count in enumerate(fewer)]
    return []


def _schedule_by_name(task: Task, plan: Plan, name: str) -> list[Plan]:
    """Return a plan with its step under a named schedule, or [] if it does not fit.

    If the order of work is free, the schedule holds as many microbatches as keep all devices busy, or fewer.
    """
    memory = [device.memory_bytes for device in task.machine.devices]
    scheduler = Scheduler(name, len(task.machine))
    made = build_schedule(replace(plan, schedule=name), scheduler, plan.n_microbatches, memory)
    if plan.schedule != SEARCH:
        found = replace(plan, step_ms=simulate_step(plan, made))
        # Replicas hold other numbers of microbatches than the workload says.
        limits = list_limits(plan, task.machine)
        return [found] if not list_short(found, task.machine) and fits(plan, made, limits) else []
    homes = tuple(stage.devices for stage in plan.stages)
    held = count_in_flight(homes)
    fewer = range(max(held)) if isfinite(memory[0]) else ()
    others = [schedule_replicas(name, homes, plan.n_microbatches, [max(1, n - less) for n in held]) for less in fewer]
    plans = [state_order(task, plan, each) for each in dict.fromkeys([made, *others])]
    fitting = [found for found in plans if not list_short(found, task.machine)]
    return [min(fitting, key=_read_step)] if fitting else []


def _read_step(plan: Plan | None) -> float:
    """Return the simulated step of a plan, in ms; infinite without one."""
    return inf if plan is None or plan.step_ms is None else plan.step_ms


def _search_chains(
    task: Task, chains: Antichains, states: States, lines: LineSearch, best: Plan | None, clock: SearchClock
) -> tuple[ChainSearch, Plan | None]:
    """Return what is known of chains with two stages a device, and the best plan, None if none fits.

    The chains include those with the smallest bottleneck under the named schedules, so no such plan is faster.
    """
    prices: Prices | Levels = lines.least_prices
    if lines.prices.nested.size == 0:
        prices = sort_into_levels(lines.least_prices, LEVELS)
    found = ChainSearch(ChainBound(prices, lines.devices, lines.m), lines.lattice, lines.m)
    families = [(placement, k) for k in range(lines.devices, 1, -1) for placement in PLACEMENTS]
    if best is not None:
        found.bound.bound_by_sums(_read_step(best))
        families = [*found.bound.bounds]
    for chain, plan in list_usual_chains(task, chains, states, clock, families):
        found.usual.append(chain)
        best = _take_faster(task, best, plan)
    if best is not None:
        if not found.bound.bounds:
            found.bound.bound_by_sums(_read_step(best))
        found.run(_read_step(best), clock.deadline)
    return found, best


def _search_orders(
    task: Task,
    chains: Antichains,
    lines: LineSearch,
    found: ChainSearch,
    best: Plan | None,
    deadline: float,
) -> Plan | None:
    """Return the best plan after searching for the orders of lines without replicas, and of chains.

    Each search also bounds the step of its line or chain. Those that may still be better get a second and longer
    search. The searches end at the `deadline`, of time.monotonic(), at the latest.
    """
    steps: dict[Line | Chain, float] = {}
    steps.update((line, step) for line, step in lines.steps.items() if all(stage.replicas == 1 for stage in line))
    steps.update(found.steps.items())
    bounds: dict[Line | Chain, float] = {}
    for way in steps:
        if isinstance(way, Chain):
            bounds[way] = max(found.bound.bound_chain(way), found.bound.bounds.get(way.family, 0.0))
        else:
            bounds[way] = max(lines.bound_line(way), lines.bound)
    ranked = [way for way in sorted(steps, key=steps.__getitem__) if steps[way] < NEVER]
    warm_up()
    again, begin = [], time.thread_time()
    for way in dict.fromkeys([*ranked[:BY_STEP], *sorted(ranked, key=bounds.__getitem__)[:BY_BOUND]]):
        if bounds[way] < _read_step(best) and time.thread_time() < begin + FIRST_S and time.monotonic() < deadline:
            plan, bound = _search_order(task, chains, way, SHORT_S)
            again.append((bound, way))
            best = _take_faster(task, best, plan)
    for turn, (bound, way) in enumerate(sorted(again, key=itemgetter(0))[:TWICE]):
        left = min(deadline - time.monotonic(), begin + WHOLE_S - time.thread_time()) / (TWICE - turn)
        low = min(lines.bound, found.bound.least(_read_step(best)))
        if max(bound, low * (1 + CLOSE)) < _read_step(best) * (1 - PROVEN) and left > 0:
            best = _take_faster(task, best, _search_order(task, chains, way, left)[0])
    return best


def _take_faster(task: Task, best: Plan | None, plan: Plan | None) -> Plan | None:
    """Return the faster of the best plan and another one, if that fits in memory."""
    if plan is None or _read_step(plan) >= _read_step(best):
        return best
    return best if list_short(plan, plan.machine or task.machine) else plan


def _search_order(task: Task, chains: Antichains, way: Line | Chain, seconds: float) -> tuple[Plan | None, float]:
    """Return the plan of a line or chain with a searched order, and a bound of the step in ms; None if none fits."""
    placement = way.placement if isinstance(way, Chain) else None
    best, bound = None, inf
    for plan in _price_ways(task, chains, way):
        limits = list_limits(plan, plan.machine or task.machine)
        with suppress(ScheduleError):
            found = search_for_plan(plan, limits, time_limit_s=seconds, placement=placement)
            best = _take_faster(task, best, state_order(task, plan, found.schedule))
            bound = min(bound, found.bound_ms)
    return best, bound


def _price_ways(task: Task, chains: Antichains, way: Line | Chain) -> list[Plan]:
    """Return the plan of a line, or the plans of a chain: with all stages recomputing too, if memory is limited."""
    if not isinstance(way, Chain):
        return [price_plan(task, chains, way)]
    limited = isfinite(task.machine.devices[0].memory_bytes)
    tried = {"never": [False], "always": [True], "auto": [False, True] if limited else [False]}[task.recompute]
    return [price_chain_plan(task, chains, way, [again] * len(way.ends)) for again in tried]


def _check(task: Task) -> None:
    """Raise PlanError for a task that the search for the shortest step does not solve, with the reason."""
    machine, options, schedule = task.machine, task.options, task.workload.schedule
    equal = machine.uniform and not any(device.host for device in machine.devices)
    reasons = {
        f"is not for cost model {options.model!r}: give {' or '.join(MODELS)}": options.model not in MODELS,
        f"is not for schedule {schedule!r}: give one of {', '.join(SCHEDULES)}": schedule not in SCHEDULES,
        "takes as many devices as help, in their order: give use_all=False and free=False": options.use_all
        or options.free,
        "needs equal devices and equal links": not equal,
        "needs transfers='asynchronous'": machine.transfers == "blocking",
        "takes no pins": bool(task.pinned or task.never),
    }
    for reason, unfit in reasons.items():
        if unfit:
            raise PlanError(f"objective='step' {reason}, or minimise the bottleneck (objective='bottleneck')")
