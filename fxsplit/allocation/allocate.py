"""Allocate devices to jobs: the counts with the largest sum of values, by dynamic programming over the devices.

Devices are equal, so an allocation is a count for each job, and the best one is a multiple-choice knapsack. Let
best[m] be the largest sum of the first jobs on exactly m devices. Another job with the value value[k] of k devices
makes it max over k of best[m - k] + value[k]. No property of the values is used: they may fall and need not be concave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any, Literal

import numpy as np

from fxsplit.allocation.job import Job, Values
from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import TOO_LARGE, format_count, is_amount, is_count, show
from fxsplit.system.shown import Parts, Shown, Table

Objective = Literal["throughput", "share"] | Callable[[Job, int], float]
OBJECTIVES = ("throughput", "share")
CELLS = 1 << 15
"""The number of sums that are formed at once, so that they stay in a processor's cache."""


@dataclass(frozen=True, repr=False)
class Allocation(Shown):
    """The devices of each job, by its name.

    - `objective` is the sum of `gains`, or with the objective "share" the smallest of them
    - `gains`: what each job adds to the objective
    - `reasons`: why each job has no more devices
    - `current`: the devices that each job had before
    """

    counts: dict[str, int]
    objective: float
    gains: dict[str, float]
    reasons: dict[str, str]
    current: dict[str, int]
    jobs: tuple[Job, ...]
    n_devices: int

    def show(self) -> Parts:
        """Return a table of the jobs, and a line about the objective."""
        rows = [
            (job.name, self.current[job.name], count, f"{job.rate(count):g}", f"{self.gains[job.name]:g}", reason)
            for job, count, reason in zip(self.jobs, self.counts.values(), self.reasons.values(), strict=True)
        ]
        yield Table(("job", ">now", ">devices", ">samples/s", ">gain", "why no more"), rows)
        yield f"objective {self.objective:g}, {self.summarise()}"

    def summarise(self) -> str:
        """Return the number of devices in use."""
        return f"{sum(self.counts.values())} of {format_count(self.n_devices, 'device')} in use"


def allocate(
    jobs: Sequence[Job],
    n_devices: int,
    current: Mapping[str, int] | None = None,
    *,
    horizon_s: float,
    objective: Objective = "throughput",
) -> Allocation:
    """Return the best allocation of equal devices to jobs; of equally good ones, one with the fewest devices.

    jobs: jobs with curves.
    current: the devices that jobs have now, by name; 0 for a job without an entry.
    horizon_s: for how long devices are expected to stay, in seconds.
    objective: "throughput", the sum of the jobs' `gains`; "share", the smallest part of its best rate on `n_devices`
        that any job gets until the horizon, and then throughput; or a function of a job and a count, whose values are
        added up. It may return -inf for a count that a job must not have.

    Raises InputError for jobs or counts that do not fit together, and if no allocation has a finite value.
    """
    check_jobs(jobs)
    now = _check_current(jobs, n_devices, current or {})
    if not is_amount(horizon_s) or not horizon_s:
        raise InputError(f"horizon_s={show(horizon_s)}: give seconds, more than 0 and less than {TOO_LARGE:g}")
    if not callable(objective) and objective not in OBJECTIVES:
        hint = suggest(objective, OBJECTIVES) if isinstance(objective, str) else ""
        raise InputError(f"objective={show(objective)}: give throughput, share, or a function of job and count{hint}")
    gains = [job.gains(count, horizon_s) for job, count in zip(jobs, now, strict=True)]
    if objective == "throughput":
        terms = values = gains
    elif objective == "share":
        terms = [_find_shares(job, count, horizon_s, n_devices) for job, count in zip(jobs, now, strict=True)]
        worst = _find_worst_share(terms, n_devices)
        values = [np.where(share >= worst, gain, -inf) for share, gain in zip(terms, gains, strict=True)]
    else:
        terms = values = [_call_objective(objective, job) for job in jobs]
    counts = choose_counts(values, n_devices)
    if counts is None:
        raise InputError(f"objective={show(objective)}: it is -inf for every allocation: allow some counts")
    chosen = {job.name: float(term[count]) for job, term, count in zip(jobs, terms, counts, strict=True)}
    return Allocation(
        counts={job.name: count for job, count in zip(jobs, counts, strict=True)},
        objective=min(chosen.values()) if objective == "share" else sum(chosen.values()),
        gains=chosen,
        reasons={
            job.name: _explain(job, count, term, n_devices)
            for job, count, term in zip(jobs, counts, terms, strict=True)
        },
        current={job.name: count for job, count in zip(jobs, now, strict=True)},
        jobs=tuple(jobs),
        n_devices=n_devices,
    )


def check_jobs(jobs: object) -> None:
    """Raise InputError unless these are jobs with curves and with names of their own."""
    if not isinstance(jobs, Sequence) or not jobs or not all(isinstance(job, Job) for job in jobs):
        raise InputError(f"jobs={show(jobs)}: give at least one Job, such as fxsplit.Job('a', [1.0, 1.9])")
    names = [job.name for job in jobs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two jobs are called {show(twice)}: give each job a name of its own")
    without = next((job for job in jobs if not len(job.curve)), None)
    if without is not None:
        raise InputError(f"{without} has no curve: fxsplit.allocate plans it from its profile")


def _check_current(jobs: Sequence[Job], n_devices: object, current: Mapping[str, int]) -> list[int]:
    """Return the devices that each job has now. Raises InputError for counts that do not fit the jobs and devices."""
    if not is_count(n_devices):
        raise InputError(f"n_devices={show(n_devices)}: give a number of devices, 0 or more")
    if not isinstance(current, Mapping):
        raise InputError(f"current={show(current)}: give the devices of jobs by name, such as {{'a': 4}}")
    names = [job.name for job in jobs]
    for name, count in current.items():
        if name not in names:
            hint = suggest(name, names) if isinstance(name, str) else ""
            raise InputError(f"current names the job {show(name)}: the jobs are {', '.join(names)}{hint}")
        if not is_count(count):
            raise InputError(f"current says that job {show(name)} has {show(count)} devices: give 0 or more")
    held = sum(current.values())
    if held > int(n_devices):  # type: ignore[call-overload]
        raise InputError(
            f"current has {held} devices in all, and there are {n_devices}: take devices that are gone off their jobs"
        )
    return [current.get(name, 0) for name in names]


def choose_counts(values: Sequence[Values], n_devices: int) -> tuple[int, ...] | None:
    """Return the counts with the largest sum of values on at most `n_devices`; None if every sum is -inf.

    Of equal sums, one on the fewest devices is returned. values: of each job, the value of 0, 1, ... devices.
    """
    values = [value[: int(value.argmax()) + 1] for value in values]
    sums = fold_values(values, n_devices)
    left = int(sums[-1].argmax())
    if sums[-1][left] == -inf:
        return None
    counts = []
    for best, value in zip(reversed(sums[:-1]), reversed(values), strict=True):
        # Only this count of devices matters of the job, so its choice is found again: that is faster than to keep all.
        most = min(left, len(value) - 1)
        counts.append(int((best[left - most : left + 1][::-1] + value[: most + 1]).argmax()))
        left -= counts[-1]
    return tuple(reversed(counts))


def fold_values(values: Sequence[Values], n_devices: int) -> list[Values]:
    """Return the largest sums of the first 0, 1, ... jobs on exactly 0, 1, ... devices.

    The devices end at `n_devices`, or at fewer if all jobs together can use only fewer.
    """
    total = min(n_devices, sum(len(value) - 1 for value in values))
    sums = [np.full(total + 1, -inf)]
    sums[0][0] = 0.0
    for value in values:
        sums.append(_add_job(sums[-1], value[: total + 1]))
    return sums


def _add_job(best: Values, value: Values) -> Values:
    """Return the maximum over k of best[m - k] + value[k], for each m."""
    size, n = len(value), len(best)
    padded = np.full(size - 1 + n, -inf)
    padded[size - 1 :] = best
    # Row k of the windows from the end is best[m - k] for each m.
    windows = np.ndarray((size, n), np.float64, padded, 0, padded.strides * 2)[::-1]
    rows = max(1, CELLS // n)
    found = np.full(n, -inf)
    for k in range(0, size, rows):
        top = (windows[k : k + rows, k:] + value[k : k + rows, None]).max(0)
        np.maximum(found[k:], top, out=found[k:])
    return found


def _find_shares(job: Job, current: int, horizon_s: float, n_devices: int) -> Values:
    """Return the part of its best rate on `n_devices` that a job gets on each count, with the cost of the move.

    A job that cannot work on so many devices has share 1, so that the other jobs decide.
    """
    best = float((job.rates[: len(job.allowed)] + job.allowed)[: n_devices + 1].max())
    if not best:
        return job.allowed + 1.0
    return replace(job, weight=1.0).gains(current, horizon_s) / (best * horizon_s)


def _find_worst_share(shares: Sequence[Values], n_devices: int) -> float:
    """Return the largest share that all jobs can have at once on `n_devices`."""
    levels = np.unique(np.concatenate(shares))
    # Every job has count 0, so the smallest share that is not -inf can be had.
    low, high = int(np.searchsorted(levels, -inf, "right")), len(levels) - 1
    while low < high:
        middle = (low + high + 1) // 2
        enough = [share >= levels[middle] for share in shares]
        if all(e.any() for e in enough) and sum(int(e.argmax()) for e in enough) <= n_devices:
            low = middle
        else:
            high = middle - 1
    return float(levels[low])


def _call_objective(objective: Callable[[Job, int], float], job: Job) -> Values:
    """Return the objective's values of a job. Raises InputError for a value that is no number."""
    values = job.allowed.copy()
    for count in np.flatnonzero(values == 0.0):
        value: Any = objective(job, int(count))
        if not isinstance(value, (int, float, np.floating)) or isnan(value) or value >= TOO_LARGE:
            raise InputError(
                f"the objective is {show(value)} for {job} on {count} devices: return a number below {TOO_LARGE:g}"
            )
        values[count] = value
    return values


def _explain(job: Job, count: int, terms: Values, n_devices: int) -> str:
    """Return why a job has no more than `count` devices. `terms`: what each count adds to the objective."""
    if count == len(terms) - 1:
        return f"{count} is its most"
    more = terms[count + 1 :]
    better = np.flatnonzero(more > terms[count])
    if not len(better):
        rates = (job.rates[: len(terms)] + job.allowed)[count + 1 :]
        if rates.max() <= job.rate(count):
            return "more devices bring no more"
        return "a move to more costs more than it brings"
    step = int(better[0]) + 1
    if count + step > n_devices:
        return f"it needs {count + step} to gain more"
    return f"{step} more would bring {more[step - 1] - terms[count]:.4g}, less than elsewhere"
