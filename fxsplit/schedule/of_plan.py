"""From a plan to its schedule, and to the times and memory of its stages for a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.memory.microbatch import MicrobatchMemory
from fxsplit.ir.facts.memory.moments import assume_moments, count_moving
from fxsplit.ir.facts.plan import Plan
from fxsplit.ir.facts.price import StagePlan, count_messages
from fxsplit.schedule.generators.catalogue import (
    INFERENCE,
    SCHEDULES,
    SEARCH,
    SPLITTING,
    Scheduler,
    count_devices,
)
from fxsplit.schedule.generators.synchronous import (
    check_takes_replicas,
    count_in_flight,
    run_forwards,
    schedule_replicas,
)
from fxsplit.schedule.homes import deal_in_turn, go_there_and_back
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.memory import Footprint
from fxsplit.schedule.simulation.simulate import Times
from fxsplit.schedule.torch_csv import parse_csv


def find_replicas(plan: Plan) -> Homes | None:
    """Return the devices of each stage if a stage has replicas (several devices), else None."""
    homes = tuple(s.devices for s in plan.stages)
    return homes if any(len(home) > 1 for home in homes) else None


def build_schedule(
    plan: Plan, scheduler: Scheduler, n_microbatches: int, memory_bytes: Sequence[float] = ()
) -> Schedule:
    """Return the schedule of a plan's training step or inference, with or without replicated stages.

    `memory_bytes` is the memory of each device (default: unlimited). A replica holds enough microbatches to keep all
    devices busy, or fewer if they do not fit. Raises ScheduleError if the schedule cannot run this plan.
    """
    if plan.schedule_csv and (scheduler.name, n_microbatches) == (plan.schedule, plan.n_microbatches):
        schedule = parse_csv(plan.schedule_csv, plan.schedule)
        if schedule.n_stages != len(plan.stages):
            raise ScheduleError(f"{plan.schedule} has {schedule.n_stages} stages, and the plan {len(plan.stages)}")
        several = _has_two_stages(schedule)
        if not several and schedule.homes != (find_replicas(plan) or scheduler.homes(len(plan.stages))):
            raise ScheduleError(f"{plan.schedule}: its stages are on other devices than those of the plan")
        return schedule
    if plan.schedule == scheduler.name == SEARCH and not plan.schedule_csv:
        raise ScheduleError("the plan has no searched schedule yet: run the pass 'schedule' after 'partition'")
    homes = find_replicas(plan)
    if homes is not None and scheduler.name == INFERENCE:
        return run_forwards(homes, n_microbatches)
    if homes is None:
        return scheduler.schedule(n_microbatches, len(plan.stages))
    # A searched order is for one number of microbatches. Others are run as plans for a search are made: under 1F1B.
    name = "1F1B" if scheduler.name == SEARCH else scheduler.name
    # Check this first: with several stages a device, `memory_bytes` does not belong to the plan's devices.
    check_takes_replicas(name)
    if scheduler.stages_per_device not in (None, 1):
        raise ScheduleError(f"{scheduler.name}: a plan with replicated stages has one stage a device")
    most = count_in_flight(homes)
    for s, (home, stage) in enumerate(zip(homes, plan.stages, strict=True)):
        room = min((memory_bytes[d] for d in home if memory_bytes), default=inf) - stage.held_bytes
        # At least one microbatch must be in flight; whether it fits is the planner's business. Fewer microbatches in
        # flight leave devices idle, but the plan runs.
        while most[s] > 1 and _count_most(stage, most[s], splits=name in SPLITTING) > room:
            most[s] -= 1
    return replace(schedule_replicas(name, homes, n_microbatches, most), name=scheduler.name)


def _has_two_stages(schedule: Schedule) -> bool:
    """Return whether a searched schedule has two stages on each device: its name does not say so."""
    count = schedule.n_devices
    return schedule.name == SEARCH and schedule.homes in (go_there_and_back(count), deal_in_turn(count, 2))


def _count_most(stage: StagePlan, in_flight: int, *, splits: bool) -> float:
    """Return the most bytes that a replica holds with `in_flight` microbatches."""
    return max(count_moving(stage, m) for m in assume_moments(in_flight, 1, splits=splits, trains=True))


def restore_schedule(plan: Plan) -> Schedule:
    """Return the schedule that a plan was made for: by its name, or from its list of actions if the name is not known.

    Raises ScheduleError if the schedule does not run the stages of the plan.
    """
    if plan.schedule_csv and plan.schedule not in (SEARCH, *SCHEDULES):
        scheduler = Scheduler.of(parse_csv(plan.schedule_csv, plan.schedule))
    else:
        scheduler = Scheduler(plan.schedule, count_devices(plan.schedule, len(plan.stages)))
    return build_schedule(plan, scheduler, plan.n_microbatches)


def name_devices(plan: Plan, schedule: Schedule) -> tuple[str, ...]:
    """Return the names of the devices of a schedule: the plan's, if they are the same devices, otherwise numbers."""
    # With replicas, the plan and the schedule have the same devices.
    if schedule.homes == find_replicas(plan):
        return plan.device_names[: schedule.n_devices]
    if schedule.n_devices != len(plan.stages):
        return tuple(f"device {d}" for d in range(schedule.n_devices))
    # Under Chimera stage d begins on device d, and its unrolled name ends with the number of the stage on that device.
    if find_replicas(plan) is None and any(len(home) > 1 for home in schedule.homes):
        return tuple(name.rpartition("/")[0] or name for name in plan.device_names)
    # One device of the schedule represents all replicas of a stage.
    return tuple("+".join(plan.device_names[d] for d in s.devices) for s in plan.stages)


def name_places(plan: Plan, schedule: Schedule) -> tuple[str, ...]:
    """Return the part of the model on each device of a schedule: the first and last nodes of its stages."""
    own = ([s for s, home in enumerate(schedule.homes) if device in home] for device in range(schedule.n_devices))
    return tuple(", ".join(plan.stages[s].place for s in stages) for stages in own)


def read_times(plan: Plan, schedule: Schedule) -> Times:
    """Return the times of a plan's stages, in ms for a microbatch.

    Under the cost model `overlapped`, a transfer occupies its link while both devices go on computing. On a machine of
    blocking transfers both devices wait for it. Under other cost models a transfer, with its latency, keeps both
    devices busy and is part of their forwards and backwards, as in the loads of the plan. Replicas of a stage reduce
    their gradients once. Raises ScheduleError if the schedule has a different number of stages.
    """
    if len(plan.stages) != schedule.n_stages:
        raise ScheduleError(
            f"{schedule.name} on {schedule.n_devices} devices has {schedule.n_stages} stages, and the plan "
            f"{len(plan.stages)}: plan for {schedule.n_stages} devices, one for each stage"
        )
    # Under `direct` a stage pays for values of any other stage, and these values pass no link of the simulation.
    busy = plan.model.name != "overlapped" and (plan.transfers == "asynchronous" or not plan.model.forwards)
    # Under `overlapped` a plan's transfers do not contain their latencies.
    cuts = [_Cut.of(plan, s) for s in plan.stages]
    last = plan.stages[-1]
    cuts.append(_Cut(last.out_bytes, last.out_gradient_bytes, 0.0))
    forward, backward, weight, reduce = [], [], [], []
    launches: tuple[list[float], list[float]] = ([], [])
    for i, stage in enumerate(plan.stages):
        # A plan divides a stage's times by its replicas. For one microbatch a replica takes the whole time.
        several = len(stage.devices) if len(schedule.homes[i]) > 1 else 1
        ahead = cuts[i].find_forward_ms(stage.receive_ms) + cuts[i + 1].find_forward_ms(stage.send_ms)
        behind = stage.receive_ms + stage.send_ms - ahead
        forward.append(several * (stage.forward_ms + ahead * busy))
        backward.append(several * (stage.backward_ms + behind * busy))
        weight.append(several * stage.weight_ms)
        reduce.append(several * stage.reduce_ms)
        launches[0].append(several * stage.forward_launch_ms)
        launches[1].append(several * stage.backward_launch_ms)
        if several == 1:  # a schedule without REDUCE actions pays for the reduction in each backward
            backward[i] += stage.reduce_ms
    # A transfer occupies its link until the slower end is done.
    ends = [0.0, *(max(a.send_ms, b.receive_ms) for a, b in pairwise(plan.stages))]
    hops = [(0.0, 0.0) if busy else cut.split_hop(end) for cut, end in zip(cuts, ends, strict=False)]
    late = [0.0 if busy else s.in_latency_ms for s in plan.stages]
    return Times(
        forward_ms=forward,
        backward_ms=backward,
        forward_hop_ms=[there for there, _ in hops],
        backward_hop_ms=[back for _, back in hops],
        reduce_ms=reduce,
        weight_ms=weight,
        forward_launch_ms=launches[0],
        backward_launch_ms=launches[1],
        latency_ms=late if any(late) else (),
        transfers=plan.transfers,
    )


class _Cut(NamedTuple):
    """The bytes that cross a cut for a microbatch, and the latency that a plan's transfer includes for each message."""

    value_bytes: float
    gradient_bytes: float
    latency_ms: float

    @classmethod
    def of(cls, plan: Plan, stage: StagePlan) -> _Cut:
        """Return the cut before a stage."""
        latency_ms = 0.0 if plan.model.name == "overlapped" else stage.in_latency_ms
        if plan.compress:
            return cls(stage.in_sent_bytes, stage.in_sent_gradient_bytes, latency_ms)
        return cls(stage.in_bytes, stage.in_gradient_bytes, latency_ms)

    def split_hop(self, transfer_ms: float) -> tuple[float, float]:
        """Return the times of the value and the gradient on the link, without latencies.

        A plan has one time for both directions over a cut. Split it by the bytes of each direction, in halves if no
        bytes are known.
        """
        hop_ms, both = transfer_ms - self._find_late_ms(transfer_ms), self.value_bytes + self.gradient_bytes
        there = hop_ms * (self.value_bytes / both if both else 0.5)
        return there, hop_ms - there

    def find_forward_ms(self, transfer_ms: float) -> float:
        """Return the part of a transfer's time that the value takes, in ms; the gradient takes the rest."""
        there, _ = self.split_hop(transfer_ms)
        messages = max(1, count_messages(self.value_bytes, self.gradient_bytes))
        return there + self._find_late_ms(transfer_ms) * (self.value_bytes > 0) / messages

    def _find_late_ms(self, transfer_ms: float) -> float:
        """Return the time of a transfer that is latency, in ms."""
        # A transfer that takes no time for a stage has no latency for it either.
        return min(transfer_ms, self.latency_ms * count_messages(self.value_bytes, self.gradient_bytes))


def read_footprints(plan: Plan) -> list[Footprint]:
    """Return the memory of each stage of a plan, in bytes."""
    return [
        Footprint(
            held_bytes=s.held_bytes,
            parameter_bytes=s.parameter_bytes,
            step_bytes=s.step_bytes,
            **{figure.name: getattr(s, figure.name) for figure in fields(MicrobatchMemory)},
        )
        for s in plan.stages
    ]
