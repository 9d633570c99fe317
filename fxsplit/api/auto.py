"""Choice: every schedule and number of microbatches there is to try, and how long a plan's step takes under each."""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit.errors import ScheduleError
from fxsplit.ir.facts.plan import Plan
from fxsplit.schedule import RUNNABLE, simulate
from fxsplit.schedule.catalogue import Scheduler
from fxsplit.schedule.of_plan import schedule_of, times_of

AUTO = "auto"
"""Stated for what is to be chosen."""
MOST_A_DEVICE = 8
"""More microbatches a device than these leave no bubble worth filling."""


@dataclass(frozen=True)
class Candidate:
    """A schedule on the devices, and a number of microbatches."""

    scheduler: Scheduler
    n_microbatches: int

    def __str__(self) -> str:
        return f"{self.scheduler.name} with {self.n_microbatches} microbatches"


def list_schedulers(schedule: str, n_devices: int, stages_per_device: int | None) -> list[Scheduler]:
    """Return the schedule stated, or all that run and take so many stages a device."""
    if schedule != AUTO:
        return [Scheduler(schedule, n_devices, stages_per_device)]
    found = []
    for name in RUNNABLE:
        scheduler = Scheduler(name, n_devices, stages_per_device)
        try:
            scheduler.homes()
        except ScheduleError:
            continue
        found.append(scheduler)
    return found


def list_microbatch_counts(rows: int, n_devices: int) -> list[int]:
    """Return the numbers of microbatches to try for a batch: one a device, and twice as many again and again."""
    tried = [n_devices << i for i in range(MOST_A_DEVICE.bit_length())]
    return [count for count in tried if count <= min(rows, MOST_A_DEVICE * n_devices)] or [rows]


def predict_step_ms(plan: Plan, candidate: Candidate) -> float:
    """Return how long a training step takes by a plan made for the candidate."""
    schedule = schedule_of(plan, candidate.scheduler, candidate.n_microbatches)
    return simulate(schedule, times_of(plan, schedule)).step_ms
