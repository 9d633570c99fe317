"""Policies: rules that give the devices of a moment to jobs, the exact rule and simpler ones to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from fxsplit.allocation.allocate import choose_counts
from fxsplit.allocation.job import Job

Policy: TypeAlias = Callable[[Sequence[Job], Sequence[int], int, float], Sequence[int]]
"""Takes jobs, their present counts, the number of devices and the horizon in seconds, and returns new counts."""


def allocate_exactly(jobs: Sequence[Job], current: Sequence[int], n_devices: int, horizon_s: float) -> Sequence[int]:
    """Return the counts with the largest gain until the horizon."""
    gains = [job.gains(count, horizon_s) for job, count in zip(jobs, current, strict=True)]
    return choose_counts(gains, n_devices) or [0] * len(jobs)


def share_equally(jobs: Sequence[Job], _: Sequence[int], n_devices: int, __: float) -> Sequence[int]:
    """Return equal counts, up to one more for the first jobs. A job below its `least` gets none."""
    each, rest = divmod(n_devices, len(jobs))
    return [_limit(job, each + (number < rest)) for number, job in enumerate(jobs)]


def serve_in_order(jobs: Sequence[Job], _: Sequence[int], n_devices: int, __: float) -> Sequence[int]:
    """Return for each job in turn as many devices as are left and as it may have."""
    counts = []
    for job in jobs:
        counts.append(_limit(job, n_devices))
        n_devices -= counts[-1]
    return counts


def add_greedily(jobs: Sequence[Job], current: Sequence[int], n_devices: int, horizon_s: float) -> Sequence[int]:
    """Return the counts that grow from 0 by the step with the largest gain a device, as long as a step gains."""
    gains = [job.gains(count, horizon_s) for job, count in zip(jobs, current, strict=True)]
    counts = [0] * len(jobs)

    def find_step(number: int) -> tuple[float, int, int]:
        """Return the gain a device of a job's next step, minus the job's number, and the devices of the step."""
        count, gain = counts[number], gains[number]
        more = 1 if count else jobs[number].least
        if count + more >= len(gain):
            return 0.0, -number, 0
        return float(gain[count + more] - gain[count]) / more, -number, more

    steps = [find_step(number) for number in range(len(jobs))]
    while True:
        # Of equal steps the first job's is taken.
        gain, job, more = max((step for step in steps if step[2] <= n_devices), default=(0.0, 0, 0))
        if gain <= 0.0:
            return counts
        counts[-job] += more
        n_devices -= more
        steps[-job] = find_step(-job)


def _limit(job: Job, count: int) -> int:
    """Return the count of a job that is offered so many devices."""
    return 0 if count < job.least else min(count, len(job.allowed) - 1)


POLICIES: dict[str, Policy] = {
    "exact": allocate_exactly,
    "equal": share_equally,
    "first-come": serve_in_order,
    "greedy": add_greedily,
}
"""The policies by name."""
