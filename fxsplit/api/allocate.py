"""allocate() and replay(): share equal devices among jobs, whose rates are stated or planned from profiles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from fxsplit.allocation import allocate as exact
from fxsplit.allocation import replay as replays
from fxsplit.allocation.allocate import Allocation, Objective
from fxsplit.allocation.job import Job
from fxsplit.allocation.policies import POLICIES
from fxsplit.allocation.replay import Event, Replay
from fxsplit.api.plan import plan
from fxsplit.errors import InputError, NoFit
from fxsplit.formats.jobs_toml import JobsFile, read_events, read_jobs
from fxsplit.ir.facts.given.machine import Device, Machine
from fxsplit.system.interrupts import lose_no_interrupt
from fxsplit.system.progress import track
from fxsplit.system.progress_bar import show_progress

Jobs = Sequence[Job] | str | os.PathLike[str]
Horizon = float | Literal["auto"]


@lose_no_interrupt
def allocate(
    jobs: Jobs,
    n_devices: int,
    current: Mapping[str, int] | None = None,
    *,
    horizon_s: float | None = None,
    objective: Objective = "throughput",
    device: Device | None = None,
) -> Allocation:
    """Return the devices of each job: 0, or `least` to `most`, with the largest objective on `n_devices`.

    jobs: jobs, or the path of a jobs.toml. A job with a profile gets the curve of its best plans on 1, 2, ... devices.
    current: the devices that jobs have now, by name; 0 for a job without an entry.
    horizon_s: for how long devices are expected to stay, in seconds (default: the file's).
    objective: "throughput" is the sum over jobs of weight x (horizon x rate - present rate x seconds of the move).
        "share" is the smallest part of its best rate on `n_devices` that any job gets until the horizon, and then
        throughput. A function of a job and a count returns what they are worth; values of jobs are added up.
    device: the device that all devices are like, for jobs with a profile (default: the file's, or without limits).

    The allocation is exact for any rates: they may fall, and steps need not become smaller. Of equally good
    allocations, one with the fewest devices is returned. Raises InputError for invalid arguments.
    """
    known, stated = _take_jobs(jobs, device, horizon_s)
    if stated == "auto":
        raise InputError("horizon_s='auto' needs the devices of the past: give seconds, or replay events")
    return exact.allocate(known, n_devices, current, horizon_s=stated, objective=objective)


@lose_no_interrupt
def replay(
    jobs: Jobs,
    events: Sequence[Event] | str | os.PathLike[str],
    *,
    horizon_s: Horizon | None = None,
    policies: Sequence[str] = tuple(POLICIES),
    seed: int = 0,
    device: Device | None = None,
) -> Replay:
    """Return what jobs would have done on devices that come and go, under each policy.

    events: (time in seconds, idle devices from then on), or the path of a CSV with the columns time_s and devices. The
        replay ends at the last event.
    horizon_s: for how long policies expect devices to stay, in seconds (default: the file's); "auto": for as long as a
        running job has kept its number of devices so far, on average.
    policies: "exact", which is `allocate`, "equal", "first-come" and "greedy".
    seed: of the devices that go: each idle device is as likely as another, in the hands of a job or not.
    jobs, device: as in `allocate`.

    Raises InputError for invalid arguments.
    """
    known, stated = _take_jobs(jobs, device, horizon_s)
    found = read_events(events) if isinstance(events, (str, os.PathLike)) else events
    return replays.replay(known, found, horizon_s=stated, policies=policies, seed=seed)


def _take_jobs(jobs: Jobs, device: Device | None, horizon_s: Horizon | None) -> tuple[Sequence[Job], Horizon]:
    """Return jobs with curves, and the horizon. Raises InputError without a horizon."""
    file = JobsFile((), Device("device"), None)
    if isinstance(jobs, (str, os.PathLike)):
        file = read_jobs(jobs)
        known: Sequence[Job] = file.jobs
    else:
        known = jobs
    horizon = file.horizon_s if horizon_s is None else horizon_s
    if horizon is None:
        raise InputError("there is no horizon: state horizon_s, for how many seconds devices are expected to stay")
    if isinstance(known, Sequence) and any(isinstance(job, Job) and job.profile is not None for job in known):
        with show_progress():
            known = [plan_curve(job, device or file.device) for job in track(known, "curves of jobs")]
    return known, horizon


def plan_curve(job: Job, device: Device) -> Job:
    """Return a job with the curve of its best plans for 1 to `most` devices, from its profile.

    A job with a curve is returned unchanged. `plan(best=True)` makes the plans, for a batch of the job's microbatches.
    A number of devices has rate 0 if no plan fits in memory. A larger number is at least as fast as a smaller one,
    since it can run the same plan.
    Raises InputError without `most`.
    """
    if job.profile is None:
        return job
    if job.most is None:
        raise InputError(f"{job} has a profile and no most: state the largest number of devices to plan for")
    count = job.n_microbatches or 2 * job.most
    rates: list[float] = []
    for n in range(1, job.most + 1):
        devices = tuple(replace(device, name=f"device{i}") for i in range(n))
        try:
            found = plan(job.profile, Machine(devices, (inf,) * (n - 1)), best=True, n_microbatches=count)
        except NoFit:
            rates.append(0.0)
            continue
        if not found.step_ms:
            raise InputError(f"{job} has no time of a step of {count} microbatches on {n} devices: give fewer of them")
        rate = 1e3 * count * found.rows / found.step_ms
        rates.append(max([rate, *rates]))
    return replace(job, curve=rates, profile=None)
