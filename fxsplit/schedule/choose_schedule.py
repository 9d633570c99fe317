"""Choose the schedule of a plan: the one with the shortest simulated step among those that fit in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fxsplit.ir.facts.compared import ComparedSchedule
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.plan import Plan
from fxsplit.schedule.generators.catalogue import SEARCH, SPLITTING, Scheduler
from fxsplit.schedule.of_plan import build_schedule, find_replicas
from fxsplit.schedule.schedule_plan import (
    generate_from_times,
    list_limits,
    list_short,
    search_for_plan,
    simulate_step,
    take_schedule,
)
from fxsplit.schedule.solver.search import is_warm

NAMES = ("1F1B", "GPipe", "ZB-H1")
"""The schedules that every plan is compared under. Of equal steps, the first one's schedule is chosen."""
SAME = 1e-5
"""Steps that differ by at most this share are equal: nothing is measured so exactly."""
MOST_GENERATED, MOST_COMPILED, MOST_SEARCHED = 120, 1_000, 300
"""Numbers of actions. ZB-H2 is compared up to the first number, or up to the second if machine code generates it. A
searched schedule is compared up to the third. With more actions, generating takes longer than the 50 ms of a choice.
"""
LEAST_S = 0.005
"""No search begins if less time than this is left, in seconds."""


def choose_schedule(
    plan: Plan, costs: Costs, machine: Machine, workload: Workload, *, limit_s: float, splits: bool = True
) -> tuple[Plan, Workload]:
    """Return a plan and its workload under the schedule with the shortest simulated step among those that fit.

    The choice is among NAMES, ZB-H2 and a searched schedule. The stages stay as they are, one on each device. The
    returned plan lists the compared schedules with their steps. A plan that states the actions of its schedule is
    returned unchanged, and so is a plan that fits in memory under none of the schedules.

    - `limit_s`: the search ends this many seconds after the choice begins. Without compiled kernels there is no search
    - `splits`: whether backwards may be split; otherwise only 1F1B and GPipe are compared
    """
    if plan.schedule_csv:
        return plan, workload
    deadline = time.monotonic() + limit_s
    choices = sorted(_list_choices(plan, machine, deadline, splits=splits), key=lambda choice: choice.step_ms)
    compared = [ComparedSchedule(choice.scheduler.name, choice.step_ms) for choice in choices]
    for number, choice in enumerate(choices):
        made, scheduled = take_schedule(plan, choice.scheduler, costs, machine, workload)
        compared[number] = replace(compared[number], fits=not list_short(made, machine))
        if compared[number].fits:
            return replace(made, compared=tuple(compared)).prove(plan.proof), scheduled
    # Only a plan that a pass has made may need more memory than there is. It keeps its schedule.
    return plan, workload


def find_nearest_named(plan: Plan) -> tuple[str, float] | None:
    """Return the fastest schedule by name for a plan with a searched order, and by which share its step is longer.

    The share is 0 if the steps are the same. None for a plan with another schedule, or without its costs and machine,
    and if none of NAMES fits in memory.
    """
    costs, machine = plan.costs, plan.machine
    if plan.schedule != SEARCH or not plan.schedule_csv or costs is None or machine is None or not plan.step_ms:
        return None
    usual, found = replace(plan, schedule=NAMES[0], schedule_csv=""), list[tuple[float, str]]()
    workload = Scheduler(NAMES[0], len(machine)).describe(len(machine), plan.n_microbatches, may_idle=True)
    workload = replace(workload, replicated=find_replicas(plan) is not None)
    for name in NAMES:
        made, _ = take_schedule(usual, Scheduler(name, len(machine)), costs, machine, workload)
        if made.step_ms is not None and not list_short(made, machine):
            found.append((made.step_ms / plan.step_ms - 1, name))
    longer, name = min(found, key=lambda each: each[0], default=(0.0, ""))
    return (name, longer if longer > SAME else 0.0) if name else None


class _Choice(NamedTuple):
    """A schedule, and the simulated time of a step under it in ms."""

    scheduler: Scheduler
    step_ms: float


def _list_choices(plan: Plan, machine: Machine, deadline: float, *, splits: bool) -> Iterator[_Choice]:
    """Yield the schedules that a plan is compared under. A step within SAME of an earlier one gets the earlier time."""
    memory_bytes = [device.memory_bytes for device in machine.devices]
    steps: list[float] = []
    for scheduler in _list_schedulers(plan, machine, deadline, splits=splits):
        schedule = build_schedule(plan, scheduler, plan.n_microbatches, memory_bytes)
        step_ms = simulate_step(plan, schedule)
        steps.append(next((known for known in steps if abs(known - step_ms) <= SAME * known), step_ms))
        yield _Choice(scheduler, steps[-1])


def _list_schedulers(plan: Plan, machine: Machine, deadline: float, *, splits: bool) -> Iterator[Scheduler]:
    """Yield the schedulers to compare for a plan: fewer if stages have replicas, or if a step has many actions."""
    yield from (Scheduler(name, len(machine)) for name in NAMES if splits or name not in SPLITTING)
    if not splits or find_replicas(plan) is not None:
        return
    limits, actions = list_limits(plan, machine), 3 * len(plan.stages) * plan.n_microbatches
    if actions <= (MOST_COMPILED if is_warm() else MOST_GENERATED):
        made = generate_from_times(replace(plan, schedule="ZB-H2"), machine, limits)
        yield Scheduler("ZB-H2", len(machine)) if made is None else Scheduler.of(made)
    # The search assumes that devices compute during transfers.
    if is_warm() and actions <= MOST_SEARCHED and plan.transfers == "asynchronous":
        left_s = deadline - time.monotonic()
        if left_s >= LEAST_S:
            yield Scheduler.of(search_for_plan(plan, limits, time_limit_s=left_s).schedule)
