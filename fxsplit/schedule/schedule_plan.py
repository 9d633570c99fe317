"""The schedule of a plan, searched or generated from its times, within the memory of its devices.

The sizes of a stage, such as its resting bytes, are explained at `StagePlan` in ir/facts/price.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.memory.moments import count_moving
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import StagePlan, price_split
from fxsplit.schedule.generators.catalogue import FROM_TIMES, SEARCH, Scheduler, generate
from fxsplit.schedule.generators.synchronous import one_f_one_b
from fxsplit.schedule.moments import list_moments
from fxsplit.schedule.of_plan import build_schedule, find_replicas, read_times, restore_schedule
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.simulation.simulate import simulate
from fxsplit.schedule.solver.search import Placement, SearchResult, place_stages, search
from fxsplit.schedule.torch_csv import parse_csv
from fxsplit.system.figures import show

MOST_SIMULATED = 30_000
"""A schedule with more actions is not simulated for every plan: it would take more than a fifth of a second."""
ATTEMPTS = 4
"""How often a search begins again with less memory, if messages between stages need the rest."""


def schedule_plan(
    plan: Plan,
    costs: Costs,
    machine: Machine,
    workload: Workload,
    *,
    memory: float | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> tuple[Plan, Workload, SearchResult | None]:
    """Return a plan and its workload under the schedule for the plan's times, and the search result if there is one.

    - Under "search" the schedule is searched.
    - Under a schedule of FROM_TIMES it is generated from the plan's times. It is used if it fits in memory and is
      faster than the schedule for equal times.
    - A plan that states the actions of its schedule keeps them. Its machine is unrolled if devices have several stages.
    - Other plans are returned unchanged.

    `memory`, `time_limit_s`, `seed` and the errors are those of `search_for_plan`.
    """
    if plan.schedule_csv and workload.schedule_csv == plan.schedule_csv:
        return plan, workload, None
    if plan.schedule_csv:
        scheduler = Scheduler.of(parse_csv(plan.schedule_csv, plan.schedule))
        return *take_schedule(plan, scheduler, costs, unroll_for(scheduler, machine), workload), None
    limits = list_limits(plan, machine)
    if plan.schedule == SEARCH:
        found = search_for_plan(plan, limits, memory=memory, time_limit_s=time_limit_s, seed=seed)
        return *take_schedule(plan, Scheduler.of(found.schedule), costs, machine, workload), found
    made = generate_from_times(plan, machine, limits) if plan.schedule in FROM_TIMES else None
    if made is None:
        return plan, workload, None
    return *take_schedule(plan, Scheduler.of(made), costs, machine, workload), None


def unroll_for(scheduler: Scheduler, machine: Machine) -> Machine:
    """Return the machine for a schedule that is stated: unrolled if it places several stages on a device."""
    fixed = scheduler.fixed
    return machine.rolled().unrolled(fixed.homes) if fixed is not None and fixed.shares_devices else machine


def list_limits(plan: Plan, machine: Machine) -> list[float]:
    """Return the memory that each stage may use, in bytes."""
    return [stage.find_limit(machine) for stage in plan.stages]


def list_short(plan: Plan, machine: Machine) -> list[int]:
    """Return the stages that need more memory than their devices have."""
    return [i for i, stage in enumerate(plan.stages) if stage.memory_bytes > stage.find_limit(machine)]


def generate_from_times(plan: Plan, machine: Machine, limits: Sequence[float]) -> Schedule | None:
    """Return the plan's schedule, generated from the plan's times.

    Return None if it does not fit in memory, or if it is no faster than the schedule for equal times. `limits` is the
    memory of each stage in bytes.
    """
    if find_replicas(plan) is not None:
        return None
    # Stages a device: a machine for several of them has each real device as often.
    each = len(machine) // (len(machine.real) or len(machine))
    numbers = len(plan.stages) // each, plan.n_microbatches, each
    equal = generate(plan.schedule, *numbers)
    times = read_times(plan, equal)
    made = generate(plan.schedule, *numbers, times)
    faster = simulate(made, times).step_ms < simulate(equal, times).step_ms
    return made if faster and fits(plan, made, limits) else None


def search_for_plan(
    plan: Plan,
    limits: Sequence[float] = (),
    *,
    memory: float | None = None,
    n_microbatches: int | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    placement: Placement | None = None,
) -> SearchResult:
    """Return the schedule with the shortest step for a plan's stages.

    - `limits`: the memory of each stage's device in bytes (default: unlimited)
    - `memory`: how many microbatches each device may hold at most (default: as many as fit in `limits`)
    - `placement`: where the second stages go, for a plan with two stages on each device (default: one stage)
    - the other arguments are those of `search`

    Plans with one stage a device are made for 1F1B. If no searched schedule is sure to fit and as fast as 1F1B, return
    1F1B, with a bound of 0. Raises ScheduleError for a plan with replicas, for numbers out of range, and if no schedule
    is sure to fit with `memory`, or with two stages a device.
    """
    if find_replicas(plan) is not None:
        raise ScheduleError(f"{SEARCH}: a plan with replicated stages has no searched schedule: give schedule='1F1B'")
    if memory is not None and memory < 1:
        raise ScheduleError(
            f"{SEARCH}: memory={show(memory)}: a device must hold one microbatch at least: give 1 or more"
        )
    count, each = n_microbatches or plan.n_microbatches, 1 if placement is None else 2
    base = one_f_one_b(len(plan.stages), count)
    times = read_times(plan, base)
    bytes_ = limits or [inf] * len(plan.stages)
    rooms = [limit - stage.held_bytes for limit, stage in zip(bytes_, plan.stages, strict=True)]
    planned = simulate(base, times).step_ms if each == 1 else inf
    for attempt in range(ATTEMPTS):
        held = [_count_room(stage, room) - attempt for stage, room in zip(plan.stages, rooms, strict=True)]
        # The stages of a device have equal memory, so the stage with less room limits both.
        held = held if placement is None else [min(held[s] for s in own) for own in _list_own(placement, len(held))]
        most = [room if memory is None else min(memory, room) for room in held]
        if min(most) < 1:
            break
        made = search(
            times,
            n_devices=len(most),
            n_microbatches=count,
            stages_per_device=each,
            placement=placement or "v",
            memory=most,
            kept_for_weights=[_find_kept(stage) for stage in plan.stages],
            time_limit_s=time_limit_s,
            seed=seed,
        )
        if (memory is not None or made.step_ms <= planned) and fits(plan, made.schedule, bytes_):
            return made
    if memory is not None or placement is not None:
        stated = "" if memory is None else f" with memory={show(memory)}"
        raise ScheduleError(f"{SEARCH}: no schedule{stated} is sure to fit the devices: give less")
    return SearchResult(replace(base, name=SEARCH), planned, 0.0)


def take_schedule(
    plan: Plan, scheduler: Scheduler, costs: Costs, machine: Machine, workload: Workload
) -> tuple[Plan, Workload]:
    """Return the plan and the workload under the schedule of `scheduler`, with the same number of microbatches.

    The stages stay as they are. Their memory is computed for the new schedule, and the step is simulated again.
    """
    made = scheduler.describe(len(machine), workload.n_microbatches, may_idle=workload.may_idle)
    # A stage with replicas by choice of the plan: the schedule does not place every stage on several devices.
    made = replace(made, recompute=workload.recompute, replicated=workload.replicated)
    split = [(stage.nodes, stage.devices, stage.recompute) for stage in plan.stages]
    priced = tuple(price_split(costs, machine, made, split, plan.model))
    again = Plan.assemble(
        priced, costs, machine, made, plan.model, lower_bound_ms=plan.lower_bound_ms, n_states=plan.n_states
    )
    memory_bytes = [device.memory_bytes for device in machine.devices]
    schedule = scheduler.fixed or build_schedule(again, scheduler, workload.n_microbatches, memory_bytes)
    step_ms, low = simulate_step(again, schedule), plan.step_lower_bound_ms
    return replace(again, step_ms=step_ms, step_lower_bound_ms=low).prove(plan.proof), made


def order_replicas(plan: Plan, costs: Costs, machine: Machine, workload: Workload) -> tuple[Plan, Workload]:
    """Return a plan with replicas, and its workload, with an order of work that is 1F1B's under the name "search".

    No search is made for plans with replicas: their order is the one of the plan, for its own number of microbatches.
    """
    memory_bytes = [device.memory_bytes for device in machine.devices]
    usual = replace(plan, schedule="1F1B", schedule_csv="")
    made = build_schedule(usual, Scheduler("1F1B", len(machine)), workload.n_microbatches, memory_bytes)
    return take_schedule(plan, Scheduler.of(replace(made, name=SEARCH)), costs, machine, workload)


def state_step(plan: Plan) -> Plan:
    """Return the plan with the simulated time of its step, in ms.

    A plan that states its step is returned unchanged. So is a plan that the runtime cannot run, and one whose schedule
    has more than MOST_SIMULATED actions: simulating it would take longer than most searches for a plan.
    """
    actions = 3 * len(plan.stages) * plan.n_microbatches
    in_order = [s.devices for s in plan.stages] == sorted(s.devices for s in plan.stages)
    if plan.step_ms is not None or not plan.model.forwards or not in_order or actions > MOST_SIMULATED:
        return plan
    return replace(plan, step_ms=simulate_step(plan, restore_schedule(plan))).prove(plan.proof)


def simulate_step(plan: Plan, schedule: Schedule) -> float:
    """Return the time of a plan's step under a schedule, in ms."""
    return simulate(schedule, read_times(plan, schedule)).step_ms


def _list_own(placement: Placement, n_stages: int) -> list[list[int]]:
    """Return the stages of each device, which has two."""
    homes = place_stages(n_stages // 2, 2, placement)
    return [[s for s, (home,) in enumerate(homes) if home == d] for d in range(n_stages // 2)]


def _count_room(stage: StagePlan, room: float) -> float:
    """Return how many microbatches a stage can hold in `room` bytes while an action on one of them runs."""
    each = max(stage.resting_bytes, stage.halfway_bytes)
    runs = max(stage.forward_bytes, stage.early_bytes, stage.late_bytes, stage.whole_bytes)
    return inf if each <= 0 else (room - max(runs - each, 0.0)) / each


def _find_kept(stage: StagePlan) -> float:
    """Return the share of a stage's activations that only its weight gradient frees."""
    # Between its halves a backward may hold more than before it: gradients that wait.
    most = max(stage.resting_bytes, stage.halfway_bytes)
    return 1.0 if most <= 0 else stage.halfway_bytes / most


def fits(plan: Plan, schedule: Schedule, limits: Sequence[float]) -> bool:
    """Return whether each stage, with its sent messages, stays within its limit in bytes at all times of a schedule."""
    moments = list_moments(schedule)
    return all(
        max(count_moving(stage, moment) for moment in own) <= limit - stage.held_bytes
        for stage, own, limit in zip(plan.stages, moments, limits, strict=True)
    )
