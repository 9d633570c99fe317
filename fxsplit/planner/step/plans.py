"""Make plans of lines of stages, and of chains with two stages a device: price them, and state their order of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import price_split
from fxsplit.planner.solve import Task, bound_by_work, split_nodes
from fxsplit.planner.step.bound import Line
from fxsplit.planner.step.kernels.search import F, I, W
from fxsplit.planner.step.two_stages import Chain
from fxsplit.schedule.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from fxsplit.schedule.generators.catalogue import SEARCH, Scheduler
from fxsplit.schedule.generators.synchronous import append_sums
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.schedule_plan import take_schedule


def price_plan(task: Task, chains: Antichains, line: Line) -> Plan:
    """Return the plan of a line, priced by definition on the graph; its bound is that of any bottleneck."""
    split = [(home, stage.recompute) for home, stage in zip(place(line), line, strict=True)]
    return _price(task, chains, [stage.end for stage in line], split)


def price_chain_plan(task: Task, chains: Antichains, chain: Chain, recompute: Sequence[bool]) -> Plan:
    """Return the plan of a chain with two stages a device; the plan's machine is unrolled. `recompute`: of each stage.

    Until it has a schedule, each stage counts as holding all microbatches.
    """
    count, m = len(chain.ends), task.workload.n_microbatches
    held = {n: (m,) * n for n in range(1, count + 1)}
    workload = replace(task.workload, in_flight=held, moments=None)
    unrolled = replace(task, machine=task.machine.unrolled(chain.homes), workload=workload)
    split = [((s,), again) for s, again in enumerate(recompute)]
    return _price(unrolled, chains, chain.ends, split)


def _price(task: Task, chains: Antichains, ends: Sequence[int], split: Sequence[tuple[Sequence[int], bool]]) -> Plan:
    """Return the plan of stages that end at some ideals, with their devices and whether they recompute."""
    nodes = split_nodes(task.costs, chains, ends)
    stated = [(names, *rest) for names, rest in zip(nodes, split, strict=True)]
    stages = price_split(task.costs, task.machine, task.workload, stated, task.options.costs)
    low = bound_by_work(task.costs, task.machine)
    return Plan.assemble(
        stages, task.costs, task.machine, task.workload, task.options.costs, lower_bound_ms=low, n_states=len(chains)
    )


def state_order(task: Task, plan: Plan, schedule: Schedule) -> Plan:
    """Return a plan with a schedule that is stated action by action, and its step."""
    scheduler = Scheduler.of(replace(schedule, name=SEARCH))
    return take_schedule(plan, scheduler, task.costs, plan.machine or task.machine, task.workload)[0]


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
