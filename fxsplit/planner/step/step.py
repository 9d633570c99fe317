"""From a planning task to the plan with the shortest step, with its schedule and its lower bound.

The search judges lines by list schedules. Here the best lines become plans, priced by definition, and each plan's step
is simulated: the search's own figures decide nothing. Lines without replicas also get the schedule that
`schedule.search` finds for their times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite

from fxsplit.errors import NoFit, PlanError
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.lattice.states import States
from fxsplit.ir.facts.plan import PROVEN, Plan
from fxsplit.ir.facts.price import price_split
from fxsplit.planner.clock import SearchClock
from fxsplit.planner.solve import Task, bound_by_work, search, split_nodes
from fxsplit.planner.step.bound import Line, Stage
from fxsplit.planner.step.kernels import compile_kernels
from fxsplit.planner.step.kernels.search import NEVER, F, I, W
from fxsplit.planner.step.prices import price_ideals
from fxsplit.planner.step.search import CLOSE, LineSearch, list_neighbours
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.generators.synchronous import (
    REPLICABLE,
    append_sums,
    count_in_flight,
    schedule_replicas,
)
from fxsplit.schedule.of_plan import build_schedule
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.schedule_plan import fits, list_limits, list_short, search_for_plan, simulate_step, take_schedule

SIMULATED = 12
"""How many of the best lines are simulated: under a schedule that is stated, or if memory is limited."""
ATTEMPTS = 6
"""How often a list schedule is made again for less room, if actions need more memory than sums over ideals say."""
SIMPLE = ("1F1B", "ZB-H1", "GPipe")
"""Schedules that are taken instead of a searched order, if they are as fast."""
BY_STEP, BY_BOUND, SHORT_S = 8, 8, 0.15
"""For how many lines an order is searched: the best by their steps and by their bounds; and for how many seconds."""
SAME = 1e-9
"""Steps that differ by this share are the same: they are sums in another order."""
TWICE, LONG_S = 2, 1.0
"""How many of these lines are searched again, and for how many seconds."""
SCHEDULES = (SEARCH, *REPLICABLE)
"""The schedules that this search plans for: a free order of work, and the named schedules that replicas can run."""
MODELS = ("forwarded", "replicated")
"""The cost models with a step that the bound is for: both devices are busy while a value crosses a cut."""


def plan_step(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Plan:
    """Return the plan with the shortest step among lines of stages, and a lower bound over all of them.

    The number of microbatches and the schedule are the workload's: "search" leaves the order of work free. Stages have
    replicas if the cost model is `replicated`. Each stage stays within its device's memory at every moment. Raises
    NoFit if no plan that does was found, and PlanError for a task that this search cannot solve.
    """
    _check(task)
    compile_kernels()
    if isfinite(task.machine.devices[0].memory_bytes):
        # Often memory is ample. A search that looks at memory takes several times as long, so first try without.
        plan = _plan_lines(replace(task, machine=task.machine.lift_memory_limits()), chains, states, clock)
        if not list_short(plan, task.machine):
            return plan.attach(task.costs, task.machine)
    return _plan_lines(task, chains, states, clock)


def _plan_lines(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Plan:
    """Return the plan with the shortest step among lines of stages, within the memory of the task's machine."""
    machine, m = task.machine, task.workload.n_microbatches
    prices = price_ideals(task.costs, chains, machine, task.options.costs)
    most_replicas = len(machine) if task.options.model == "replicated" else 1
    lines = LineSearch(prices, list_neighbours(chains), len(machine), m, most_replicas, task.recompute)
    if isfinite(machine.devices[0].memory_bytes):
        lines.measure = partial(_measure, task, chains, lines)
    whole = chains.complete and chains.slack is None
    lines.run(_list_usual(task, chains, states, clock), clock.deadline, whole=whole)
    best = min(_list_plans(task, chains, lines), key=_read_step, default=None)
    if task.workload.schedule == SEARCH and (best is None or _read_step(best) > lines.bound * (1 + CLOSE)):
        best = _search_orders(task, chains, lines, best, clock)
    if best is None:
        raise _explain_misfit(proven=lines.bound >= NEVER)
    step = _read_step(best)
    lines.prove(step)
    return replace(best, step_lower_bound_ms=min(lines.bound, step)).prove("bound" if lines.bound < step else "search")


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
        found = _take(task, plan, write_schedule(line, lines.m, actions))
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
    plans = [_take(task, plan, replace(each, name=SEARCH)) for each in dict.fromkeys([made, *others])]
    fitting = [found for found in plans if not list_short(found, task.machine)]
    return [min(fitting, key=_read_step)] if fitting else []


def _list_usual(task: Task, chains: Antichains, states: States, clock: SearchClock) -> Iterator[Line]:
    """Yield the lines with the smallest bottleneck on all devices, on half of them, and so on: good ones to begin from.

    So the plan is never slower than these, under the best order that is found for each.
    """
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


def _read_step(plan: Plan | None) -> float:
    """Return the simulated step of a plan, in ms; infinite without one."""
    return inf if plan is None or plan.step_ms is None else plan.step_ms


def _search_orders(
    task: Task, chains: Antichains, lines: LineSearch, best: Plan | None, clock: SearchClock
) -> Plan | None:
    """Return the best plan after searching for the orders of lines without replicas.

    Each search also bounds the step of its line. The lines that may still be better get a second and longer search.
    """
    plain = [line for line in lines.rank() if all(stage.replicas == 1 for stage in line)]
    by_bound = sorted(plain, key=lines.bound_line)[:BY_BOUND]
    again = []
    for line in dict.fromkeys([*plain[:BY_STEP], *by_bound]):
        if lines.bound_line(line) >= _read_step(best) or clock.over:
            continue
        plan, bound = _search_order(task, chains, line, SHORT_S, clock)
        again.append((bound, line))
        best = _take_faster(task, best, plan)
    for bound, line in sorted(again)[:TWICE]:
        if max(bound, lines.bound * (1 + CLOSE)) < _read_step(best) * (1 - PROVEN) and not clock.over:
            best = _take_faster(task, best, _search_order(task, chains, line, LONG_S, clock)[0])
    return best


def _take_faster(task: Task, best: Plan | None, plan: Plan) -> Plan | None:
    """Return the faster of the best plan and another one, if that fits in memory."""
    return best if _read_step(plan) >= _read_step(best) or list_short(plan, task.machine) else plan


def _search_order(task: Task, chains: Antichains, line: Line, seconds: float, clock: SearchClock) -> tuple[Plan, float]:
    """Return the plan of a line with a searched order, and a bound of the line's step in ms."""
    plan = price_plan(task, chains, line)
    left = max(min(seconds, clock.deadline - time.monotonic()), 1e-3)
    found = search_for_plan(plan, list_limits(plan, task.machine), time_limit_s=left)
    return _take(task, plan, found.schedule), found.bound_ms


def price_plan(task: Task, chains: Antichains, line: Line) -> Plan:
    """Return the plan of a line, priced by definition on the graph; its bound is that of any bottleneck."""
    nodes = split_nodes(task.costs, chains, [stage.end for stage in line])
    homes = place(line)
    split = [(names, home, stage.recompute) for names, home, stage in zip(nodes, homes, line, strict=True)]
    stages = price_split(task.costs, task.machine, task.workload, split, task.options.costs)
    low = bound_by_work(task.costs, task.machine)
    return Plan.assemble(
        stages, task.costs, task.machine, task.workload, task.options.costs, lower_bound_ms=low, n_states=len(chains)
    )


def _take(task: Task, plan: Plan, schedule: Schedule) -> Plan:
    """Return a plan with a schedule that is stated action by action, and its step."""
    return take_schedule(plan, Scheduler.of(schedule), task.costs, task.machine, task.workload)[0]


def place(line: Line) -> Homes:
    """Return the devices of each stage of a line, in order."""
    homes, first = [], 0
    for stage in line:
        homes.append(tuple(range(first, first + stage.replicas)))
        first += stage.replicas
    return tuple(homes)


def write_schedule(line: Line, m: int, actions: Sequence[Sequence[tuple[int, int]]]) -> Schedule:
    """Return the schedule of a line from the actions of each device: F, I or W by number, and microbatch.

    An I without a W is a whole backward.
    """
    homes, ops = place(line), {F: FORWARD, I: INPUT_GRADIENT, W: WEIGHT_GRADIENT}
    rows = []
    for s, home in enumerate(homes):
        for replica, device in enumerate(home):
            divided = {i for action, i in actions[device] if action == W}
            done = (
                (BACKWARD if action == I and microbatch not in divided else ops[action], microbatch)
                for action, microbatch in actions[device]
            )
            rows.append(tuple(Action(s, op, microbatch, replica) for op, microbatch in done))
    return Schedule(SEARCH, m, homes, append_sums(tuple(rows), homes))


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
