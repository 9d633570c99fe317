"""What a plan was chosen from: other schedules, and other numbers of microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from fxsplit.system.figures import format_count


@dataclass(frozen=True)
class ComparedSchedule:
    """A schedule that was compared for a plan: its name, and the simulated time of a step in ms.

    `fits` says whether it stays within the memory of each device; None if that was not looked at.
    """

    schedule: str
    step_ms: float
    fits: bool | None = None

    def __str__(self) -> str:
        return f"{self.schedule} {self.step_ms:.3f} ms{' (too much memory)' if self.fits is False else ''}"


@dataclass(frozen=True)
class ComparedCount:
    """A number of microbatches that was compared for a plan, with the rows of each of them.

    `step_ms` is the step of the best plan for this number, None without one: no plan fits, or the lower bound is above
    the step of the chosen plan. `lower_bound_ms` is infinite if it is proven that no plan fits. `between`: the rows of
    the two profiles from which the times are interpolated; empty if they were measured. `single_ms` is the time of the
    whole batch on one device.
    """

    n_microbatches: int
    rows: int
    step_ms: float | None
    lower_bound_ms: float
    single_ms: float
    between: tuple[int, ...] = ()

    def __str__(self) -> str:
        step = "no plan fits" if self.step_ms is None else f"{self.step_ms:.3f} ms"
        if self.step_ms is None and isfinite(self.lower_bound_ms):
            step = f"{self.lower_bound_ms:.3f} ms at least"
        return f"{self.n_microbatches} of {format_count(self.rows, 'row')} {'~' * bool(self.between)}{step}"
