"""From a plan to its schedule, and to what a simulation needs: times and memory of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.plan import Plan
from fxsplit.schedule.catalogue import Scheduler
from fxsplit.schedule.generate import enough, replicated
from fxsplit.schedule.memory import Footprint
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulate import Times


def replicas_of(plan: Plan) -> Homes | None:
    """Return the devices of each stage, if some stage has several."""
    homes = tuple(s.devices for s in plan.stages)
    return homes if any(len(home) > 1 for home in homes) else None


def schedule_of(plan: Plan, scheduler: Scheduler, n_microbatches: int, memory_bytes: Sequence[float] = ()) -> Schedule:
    """Return the schedule of a training step by a plan, also one whose stages have several devices.

    `memory_bytes` is what each device has (default: no limit): replicas hold as many microbatches as keep all busy, or
    as fit.
    """
    homes = replicas_of(plan)
    if homes is None:
        return scheduler.schedule(n_microbatches, len(plan.stages))
    if scheduler.stages_per_device not in (None, 1):
        raise ScheduleError(f"{scheduler.name}: a plan with replicated stages has one stage a device")
    most = enough(homes)
    for s, (home, footprint) in enumerate(zip(homes, footprints_of(plan), strict=True)):
        room = min((memory_bytes[d] for d in home if memory_bytes), default=inf) - footprint.held_bytes
        each = footprint.kept_bytes * (not footprint.recompute) + footprint.boundary_bytes
        fitting = (room - footprint.kept_bytes * footprint.recompute) / each if each else inf
        most[s] = max(1, int(min(most[s], fitting)))
    return replicated(scheduler.name, homes, n_microbatches, most)


def times_of(plan: Plan, schedule: Schedule) -> Times:
    """Return the times of a plan's stages; raises ScheduleError where the schedule has another number of stages.

    Under `overlapped` transfers take time between devices; under the other cost models they keep both ends busy, as the
    plan's loads say. A stage's replicas take a microbatch each, and sum gradients once.
    """
    if len(plan.stages) != schedule.n_stages:
        raise ScheduleError(
            f"{schedule.name} on {schedule.n_devices} devices has {schedule.n_stages} stages, and the plan "
            f"{len(plan.stages)}: plan for {schedule.n_stages} devices, one for each stage"
        )
    busy = plan.model.name != "overlapped"
    shares = [_forward_share(s.in_bytes, s.in_gradient_bytes) for s in plan.stages]
    shares.append(_forward_share(plan.stages[-1].out_bytes, plan.stages[-1].out_gradient_bytes))
    forward, backward, weight, reduce = [], [], [], []
    for i, stage in enumerate(plan.stages):
        # A plan's times are divided among the devices of a stage, and one of them takes as many times as long.
        several = len(stage.devices) if len(schedule.homes[i]) > 1 else 1
        ahead = stage.receive_ms * shares[i] + stage.send_ms * shares[i + 1]
        behind = stage.receive_ms + stage.send_ms - ahead
        forward.append(several * (stage.forward_ms + ahead * busy))
        backward.append(several * (stage.backward_ms + behind * busy))
        weight.append(several * stage.weight_ms)
        reduce.append(several * stage.reduce_ms)
        if several == 1:
            backward[i] += stage.reduce_ms
    hops = [0.0 if busy else s.receive_ms for s in plan.stages]
    return Times(
        forward_ms=forward,
        backward_ms=backward,
        forward_hop_ms=[hop * share for hop, share in zip(hops, shares, strict=False)],
        backward_hop_ms=[hop * (1 - share) for hop, share in zip(hops, shares, strict=False)],
        reduce_ms=reduce,
        weight_ms=weight,
    )


def footprints_of(plan: Plan) -> list[Footprint]:
    """Return what each stage of a plan holds."""
    forwarded = plan.model.name != "direct"
    return [
        Footprint(s.held_bytes, s.kept_bytes, (s.in_bytes + s.out_bytes) * forwarded, s.parameter_bytes, s.recompute)
        for s in plan.stages
    ]


def _forward_share(value_bytes: float, gradient_bytes: float) -> float:
    """Return the share of a boundary's traffic that goes forward."""
    both = value_bytes + gradient_bytes
    return value_bytes / both if both else 0.5
