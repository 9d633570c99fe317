"""From a plan to its schedule, and to the times and the memory of its stages that a simulation needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import inf

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.memory.microbatch import MicrobatchMemory
from fxsplit.ir.facts.memory.moments import assume_moments, count_moving
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import StagePlan
from fxsplit.schedule.generators.catalogue import INFERENCE, SPLITTING, Scheduler
from fxsplit.schedule.generators.synchronous import (
    check_takes_replicas,
    count_in_flight,
    run_forwards,
    schedule_replicas,
)
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.memory import Footprint
from fxsplit.schedule.simulation.simulate import Times


def find_replicas(plan: Plan) -> Homes | None:
    """Return the devices of each stage if some stage has several, which are its replicas; else None."""
    homes = tuple(s.devices for s in plan.stages)
    return homes if any(len(home) > 1 for home in homes) else None


def build_schedule(
    plan: Plan, scheduler: Scheduler, n_microbatches: int, memory_bytes: Sequence[float] = ()
) -> Schedule:
    """Return the schedule of a training step by a plan, also by a plan whose stages have several devices.

    `memory_bytes` is what each device has (default: no limit). A replica holds as many microbatches as keep all devices
    busy, or fewer where those do not fit. Raises ScheduleError for a schedule that does not run with such a plan.
    """
    homes = find_replicas(plan)
    if homes is not None and scheduler.name == INFERENCE:
        return run_forwards(homes, n_microbatches)
    if homes is None:
        return scheduler.schedule(n_microbatches, len(plan.stages))
    # First of all: under a schedule with several stages a device, the plan's devices are not those of `memory_bytes`.
    check_takes_replicas(scheduler.name)
    if scheduler.stages_per_device not in (None, 1):
        raise ScheduleError(f"{scheduler.name}: a plan with replicated stages has one stage a device")
    most = count_in_flight(homes)
    for s, (home, stage) in enumerate(zip(homes, plan.stages, strict=True)):
        room = min((memory_bytes[d] for d in home if memory_bytes), default=inf) - stage.held_bytes
        # With less than one microbatch under way nothing runs; whether the plan fits was the planner's question.
        # Fewer microbatches under way leave devices idle, and the plan can run.
        while most[s] > 1 and _count_most(stage, most[s], splits=scheduler.name in SPLITTING) > room:
            most[s] -= 1
    return schedule_replicas(scheduler.name, homes, n_microbatches, most)


def _count_most(stage: StagePlan, in_flight: int, *, splits: bool) -> float:
    """Return what a replica holds of so many microbatches at most, in bytes."""
    return max(count_moving(stage, m) for m in assume_moments(in_flight, 1, splits=splits, trains=True))


def name_places(plan: Plan, schedule: Schedule) -> tuple[str, ...]:
    """Return what part of the model each device of a schedule has: where its stages begin and end."""
    own = ([s for s, home in enumerate(schedule.homes) if device in home] for device in range(schedule.n_devices))
    return tuple(", ".join(plan.stages[s].place for s in stages) for stages in own)


def read_times(plan: Plan, schedule: Schedule) -> Times:
    """Return the times of a plan's stages, in milliseconds for a microbatch.

    Under the cost model `overlapped` a transfer takes its link while both devices compute on. Under the other cost
    models it keeps both devices busy, as the loads of the plan count it, and is part of their forwards and backwards.
    Replicas of a stage sum their gradients once. Raises ScheduleError where the schedule has another number of stages.
    """
    if len(plan.stages) != schedule.n_stages:
        raise ScheduleError(
            f"{schedule.name} on {schedule.n_devices} devices has {schedule.n_stages} stages, and the plan "
            f"{len(plan.stages)}: plan for {schedule.n_stages} devices, one for each stage"
        )
    busy = plan.model.name != "overlapped"
    # A plan has one time for what crosses a cut both ways. Its bytes tell how much of that goes forward.
    shares = [
        _forward_share(s.in_sent_bytes, s.in_sent_gradient_bytes)
        if plan.compress
        else _forward_share(s.in_bytes, s.in_gradient_bytes)
        for s in plan.stages
    ]
    shares.append(_forward_share(plan.stages[-1].out_bytes, plan.stages[-1].out_gradient_bytes))
    forward, backward, weight, reduce = [], [], [], []
    launches: tuple[list[float], list[float]] = ([], [])
    for i, stage in enumerate(plan.stages):
        # A plan divides a stage's times by its replicas; one replica takes as many times as long for a microbatch.
        several = len(stage.devices) if len(schedule.homes[i]) > 1 else 1
        ahead = stage.receive_ms * shares[i] + stage.send_ms * shares[i + 1]
        behind = stage.receive_ms + stage.send_ms - ahead
        forward.append(several * (stage.forward_ms + ahead * busy))
        backward.append(several * (stage.backward_ms + behind * busy))
        weight.append(several * stage.weight_ms)
        reduce.append(several * stage.reduce_ms)
        launches[0].append(several * stage.forward_launch_ms)
        launches[1].append(several * stage.backward_launch_ms)
        if several == 1:  # a schedule without REDUCE actions pays for the sum in each backward
            backward[i] += stage.reduce_ms
    hops = [0.0 if busy else s.receive_ms for s in plan.stages]
    return Times(
        forward_ms=forward,
        backward_ms=backward,
        forward_hop_ms=[hop * share for hop, share in zip(hops, shares, strict=False)],
        backward_hop_ms=[hop * (1 - share) for hop, share in zip(hops, shares, strict=False)],
        reduce_ms=reduce,
        weight_ms=weight,
        forward_launch_ms=launches[0],
        backward_launch_ms=launches[1],
    )


def read_footprints(plan: Plan) -> list[Footprint]:
    """Return what each stage of a plan holds, in bytes."""
    return [
        Footprint(
            held_bytes=s.held_bytes,
            parameter_bytes=s.parameter_bytes,
            step_bytes=s.step_bytes,
            **{figure.name: getattr(s, figure.name) for figure in fields(MicrobatchMemory)},
        )
        for s in plan.stages
    ]


def _forward_share(value_bytes: float, gradient_bytes: float) -> float:
    """Return the share of a boundary's bytes that goes forward; half where nothing crosses."""
    both = value_bytes + gradient_bytes
    return value_bytes / both if both else 0.5
