"""Candidates: the schedules, each with a number of microbatches, that a compile may choose among."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxsplit.api.microbatch_count import AUTO
from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.plan import Plan
from fxsplit.schedule import RUNNABLE, simulate
from fxsplit.schedule.catalogue import Scheduler
from fxsplit.schedule.of_plan import build_schedule, read_times


@dataclass(frozen=True)
class Candidate:
    """A schedule on the devices, and a number of microbatches."""

    scheduler: Scheduler
    n_microbatches: int

    def predict_step_ms(self, plan: Plan) -> float:
        """Return the simulated time of a training step by a plan that was made for this candidate, in milliseconds."""
        schedule = build_schedule(plan, self.scheduler, self.n_microbatches)
        return simulate(schedule, read_times(plan, schedule)).step_ms

    def __str__(self) -> str:
        return f"{self.scheduler.name} with {self.n_microbatches} microbatches"


def list_schedulers(schedule: str, n_devices: int, stages_per_device: int | None) -> Sequence[Scheduler]:
    """Return the scheduler of the schedule stated; for "auto" all that run on so many devices and stages a device."""
    if schedule != AUTO:
        return [Scheduler(schedule, n_devices, stages_per_device)]
    found = []
    for name in RUNNABLE:
        scheduler = Scheduler(name, n_devices, stages_per_device)
        try:
            scheduler.homes()
        except ScheduleError:
            # Chimera, for example, takes an even number of devices: for three it is no candidate.
            continue
        found.append(scheduler)
    return found
