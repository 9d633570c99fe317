"""From a plan to what a simulation needs: times and memory of its stages."""

from __future__ import annotations

from fxsplit.errors import ScheduleError
from fxsplit.plans import Plan
from fxsplit.schedule.memory import Footprint
from fxsplit.schedule.schedule import Schedule
from fxsplit.schedule.simulate import Times


def times_of(plan: Plan, schedule: Schedule) -> Times:
    """Return the times of a plan's stages; raises ScheduleError where the schedule has another number of stages.

    Under `overlapped` transfers take time between devices; under the other cost models they keep both ends busy, as the
    plan's loads say. Replicas share a stage's microbatches, so the stage is as one device that is faster.
    """
    if len(plan.stages) != schedule.n_stages:
        raise ScheduleError(
            f"{schedule.name} on {schedule.n_devices} devices has {schedule.n_stages} stages, and the plan "
            f"{len(plan.stages)}: plan for {schedule.n_stages} devices, one for each stage"
        )
    busy = plan.model.name != "overlapped"
    shares = [_forward_share(s.in_bytes, s.in_gradient_bytes) for s in plan.stages]
    shares.append(_forward_share(plan.stages[-1].out_bytes, plan.stages[-1].out_gradient_bytes))
    forward, backward = [], []
    for i, stage in enumerate(plan.stages):
        ahead = stage.receive_ms * shares[i] + stage.send_ms * shares[i + 1]
        forward.append(stage.forward_ms + ahead * busy)
        backward.append(stage.backward_ms + stage.reduce_ms + (stage.receive_ms + stage.send_ms - ahead) * busy)
    hops = [0.0 if busy else s.receive_ms for s in plan.stages]
    return Times(
        forward_ms=forward,
        backward_ms=backward,
        forward_hop_ms=[hop * share for hop, share in zip(hops, shares, strict=False)],
        backward_hop_ms=[hop * (1 - share) for hop, share in zip(hops, shares, strict=False)],
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
