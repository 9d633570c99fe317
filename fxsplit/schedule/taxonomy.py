"""Taxonomy: the kind of parallel training that a plan is, and the bytes that it sends in a step, by kind.

The terms are those of Langer et al. 2020, "Distributed Training of Deep Learning Models: A Taxonomic Perspective".
"""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.plan import Plan
from fxsplit.schedule.of_plan import restore_schedule
from fxsplit.schedule.schedule import Schedule
from fxsplit.system.figures import format_count


@dataclass(frozen=True)
class Taxonomy:
    """The kind of a plan.

    - `parallelism`: data, model or pipeline parallel, or several of them
    - `synchronisation`: which weights the gradients of a step belong to
    - `weights`: which devices hold the weights of a stage
    - `sent_bytes` are the bytes that all devices send in a step, by their kind
    - `data_parallel_bytes` are those of plain data parallelism on as many devices
    """

    parallelism: str
    synchronisation: str
    weights: str
    sent_bytes: dict[str, float]
    data_parallel_bytes: float

    def list_bytes(self) -> list[tuple[str, float]]:
        """Return the bytes by their kind, and beside them those of plain data parallelism if the plan trains."""
        beside = [("plain data parallelism", self.data_parallel_bytes)] if "gradients back" in self.sent_bytes else []
        return [*self.sent_bytes.items(), *beside]


def classify_plan(plan: Plan) -> Taxonomy | None:
    """Return the kind of a plan under the schedule that it states; None for a plan that the runtime does not run."""
    if not plan.model.forwards:
        return None
    try:
        return classify(plan, restore_schedule(plan))
    except ScheduleError:
        return None


def classify(plan: Plan, schedule: Schedule) -> Taxonomy:
    """Return the kind of a plan under its schedule.

    r devices sum W bytes of gradients by sending 2 (r - 1) W bytes in all, as in a ring all-reduce.
    """
    holders = [len(set(home)) for home in schedule.homes]
    n_devices = len({device for home in schedule.homes for device in home})
    values, gradients = 0.0, 0.0
    for before, home, stage in zip(schedule.homes, schedule.homes[1:], plan.stages[1:], strict=False):
        # Two stages of one device exchange values in its memory.
        if before == home and len(home) == 1:
            continue
        values += stage.in_sent_bytes if plan.compress else stage.in_bytes
        gradients += stage.in_sent_gradient_bytes if plan.compress else stage.in_gradient_bytes
    sent = {"values forward": values * schedule.n_microbatches}
    whole = 0.0
    if schedule.trains:
        weights = [stage.parameter_bytes for stage in plan.stages]
        sent["gradients back"] = gradients * schedule.n_microbatches
        sent["sums of gradients"] = sum(2.0 * (r - 1) * w for r, w in zip(holders, weights, strict=True))
        whole = 2.0 * (n_devices - 1) * sum(weights)
    return Taxonomy(
        _name_parallelism(schedule, holders),
        _name_synchronisation(schedule),
        _name_holders(holders),
        sent,
        whole,
    )


def _name_parallelism(schedule: Schedule, holders: list[int]) -> str:
    """Return the kinds of parallelism."""
    count = len(holders)
    if count == 1:
        if holders[0] == 1:
            return "none (one device has the whole model)"
        return f"data ({holders[0]} devices have the whole model, and share its microbatches)"
    stages = f"{format_count(count, 'stage')} of the model on {format_count(schedule.n_devices, 'device')}"
    if schedule.n_microbatches == 1:
        return f"model ({stages}, which work one after another on a single microbatch)"
    kind = "pipeline" if max(holders) == 1 else "pipeline and data"
    return f"{kind} ({stages}, {schedule.n_microbatches} microbatches)"


def _name_synchronisation(schedule: Schedule) -> str:
    """Return how old the weights of a gradient may be."""
    if not schedule.trains:
        return "none (no weight changes)"
    if schedule.synchronous:
        return "synchronous (one optimizer step after all microbatches, which all use the same weights)"
    steps, versions = max(schedule.lag()), max(schedule.weight_versions())
    if not steps:
        return "synchronous (each optimizer step applies gradients of the newest weights)"
    return (
        f"bounded staleness (a gradient is applied at most {format_count(steps, 'optimizer step')} late, and stages "
        f"keep up to {format_count(versions, 'version')} of their weights)"
    )


def _name_holders(holders: list[int]) -> str:
    """Return which devices hold the weights of a stage."""
    several = [(number, r) for number, r in enumerate(holders) if r > 1]
    if not several:
        return "one device holds those of a stage"
    if len({r for _, r in several}) == 1 and len(several) == len(holders):
        return f"{several[0][1]} devices hold those of each stage"
    listed = ", ".join(f"{r} devices hold those of stage {number}" for number, r in several)
    return f"{listed}; one device holds those of another stage"
