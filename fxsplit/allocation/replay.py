"""Replay: jobs on devices that come and go, under policies, and the causes for which work is lost.

The work of a replay is compared with the work of *dedicated* devices: as many as are idle on average, for as long, with
the best allocation and without moves. That share is the utilisation U (Liu et al. 2021). The rest has four causes,
which add up to 1 - U:

- pre-emption: the cost of moves because a job has lost devices
- rescaling: the cost of moves that the policy has chosen
- allocation: other counts would have had a larger rate at that moment, for which the policy has not moved
- concavity: the best rate on a number of devices that changes is on average less than the best rate on its mean
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeAlias

import numpy as np

from fxsplit.allocation.allocate import check_jobs, fold_values
from fxsplit.allocation.job import Job, Values
from fxsplit.allocation.policies import POLICIES
from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import AMOUNT, TOO_LARGE, format_share, is_amount, is_count, show
from fxsplit.system.imports import import_above
from fxsplit.system.shown import Parts, Shown, Table

Event: TypeAlias = tuple[float, int]
"""A time in seconds, and the number of devices that are idle from then on."""
CAUSES = ("pre-emption", "rescaling", "allocation", "concavity")
FIRST_HORIZON_S = 60.0
"""The horizon "auto" before any job has lost or changed its devices."""


@dataclass(frozen=True)
class Outcome:
    """The course of a replay under one policy.

    - `utilisation` is U, and `losses` are the shares of the work of dedicated devices that are lost, by cause
    - `moves` counts changes that the policy has chosen, and `preemptions` those because a job has lost devices
    - `horizon_s` is the last horizon of the policy
    - `samples`: the weighted samples done up to each event, less the cost of moves
    """

    utilisation: float
    losses: dict[str, float]
    moves: int
    preemptions: int
    horizon_s: float
    samples: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class Replay(Shown):
    """The outcome of each policy, by its name, for the same events.

    - `mean_devices` are idle on average, and `dedicated_rate` is the best weighted rate on as many, in samples a second
    """

    outcomes: dict[str, Outcome]
    events: tuple[Event, ...]
    mean_devices: float
    dedicated_rate: float

    def show(self) -> Parts:
        """Return a table of the policies, and lines about the events and the horizon."""
        rows = [
            (name, *map(format_share, (one.utilisation, *one.losses.values())), one.moves)
            for name, one in self.outcomes.items()
        ]
        yield Table(("policy", ">U", *(f">{cause}" for cause in CAUSES), ">moves"), rows)
        yield self.summarise()
        if "exact" in self.outcomes:
            yield f"the last horizon of the exact policy is {self.outcomes['exact'].horizon_s:.0f} s"

    def summarise(self) -> str:
        """Return the number of events, their time and the mean number of idle devices."""
        hours = (self.events[-1][0] - self.events[0][0]) / 3600.0
        return f"{len(self.events):,} events in {hours:.1f} h, {self.mean_devices:.1f} devices idle on average"

    def picture(self, path: str | os.PathLike[str], *, dark: bool = False) -> None:
        """Draw the utilisation of each policy over time, and the idle devices below.

        path: ends in .svg, .png or .pdf; the last two need matplotlib. Raises InputError for another ending, and
        FileError if the file cannot be written.
        """
        import_above("report.picture").save_replay_picture(self, path, dark=dark)


def replay(
    jobs: Sequence[Job],
    events: Sequence[Event],
    *,
    horizon_s: float | Literal["auto"],
    policies: Sequence[str] = tuple(POLICIES),
    seed: int = 0,
) -> Replay:
    """Return the outcome of policies for devices that come and go.

    jobs: jobs with curves, which run from the first event to the last one.
    events: (time in seconds, idle devices from then on), in the order of time; the replay ends at the last one.
    horizon_s: for how long policies expect devices to stay, in seconds. "auto": for as long as a running job has kept
        its number of devices so far, on average.
    policies: names out of POLICIES.
    seed: of the devices that go: each idle device is as likely as another, in the hands of a job or not.

    A policy decides after each event. A move costs work at the rate before it, at once, as in `Job.gains`. Raises
    InputError for invalid arguments, and if no job could work on the mean number of idle devices.
    """
    check_jobs(jobs)
    _check_events(events)
    if horizon_s != "auto" and (not is_amount(horizon_s) or not horizon_s):
        raise InputError(f"horizon_s={show(horizon_s)}: give seconds, more than 0 and less than {TOO_LARGE:g}, or auto")
    for name in policies:
        if name not in POLICIES:
            raise InputError(f"policy {show(name)}: known are {', '.join(POLICIES)}{suggest(name, POLICIES)}")
    times, devices = (np.array(column) for column in zip(*events, strict=True))
    spans = np.diff(times)
    best = _find_best_rates(jobs, int(devices.max()))
    mean = float(spans @ devices[:-1] / spans.sum())
    dedicated = float(np.interp(mean, np.arange(len(best)), best))
    if not dedicated:
        raise InputError(f"the mean number of idle devices is {mean:.2f}: no job works on so few")
    followed = float(spans @ best[devices[:-1]])
    outcomes = {}
    for name in policies:
        run = _Run(jobs, name, None if horizon_s == "auto" else horizon_s, Random(seed))
        samples = [0.0, *(run.take(count, span) for (_, count), span in zip(events[:-1], spans.tolist(), strict=True))]
        outcomes[name] = run.judge(tuple(samples), followed, dedicated * float(spans.sum()))
    return Replay(outcomes, tuple(events), mean, dedicated)


def _check_events(events: Sequence[Event]) -> None:
    """Raise InputError unless events are in the order of time, and take some time in all."""
    before = 0.0
    for number, (time_s, count) in enumerate(events, 1):
        if not is_amount(time_s) or time_s < before:
            raise InputError(f"event {number} has the time {show(time_s)} s: give {AMOUNT}, in rising order")
        if not is_count(count):
            raise InputError(f"event {number} has {show(count)} devices: give a whole number, 0 or more")
        before = time_s
    if len(events) < 2 or events[0][0] == before:
        raise InputError(f"there are {len(events)} events, which take no time: the last one states the end")


def _find_best_rates(jobs: Sequence[Job], n_devices: int) -> Values:
    """Return the best weighted rate of all jobs on at most 0, 1, ..., `n_devices`."""
    rates = [job.weight * job.rates[: len(job.allowed)] + job.allowed for job in jobs]
    best = np.maximum.accumulate(fold_values(rates, n_devices)[-1])
    return np.pad(best, (0, n_devices + 1 - len(best)), "edge")


@dataclass
class _Run:
    """The state of a replay under one policy, and its sums of weighted samples."""

    jobs: Sequence[Job]
    policy: str
    horizon_s: float | None
    random: Random
    counts: list[int] = field(init=False)
    devices: int = 0
    worked: float = 0.0
    rescaling: float = 0.0
    preemption: float = 0.0
    moves: int = 0
    preemptions: int = 0
    running_s: float = FIRST_HORIZON_S
    changes: int = 1

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.jobs)

    def take(self, n_devices: int, span_s: float) -> float:
        """Let jobs run for `span_s` on another number of idle devices; return the samples done so far."""
        changed = set()
        lost = self._draw_lost(n_devices) if n_devices < self.devices else ()
        for number, count in enumerate(lost):
            if count:
                self.preemption += self._price(number, self.counts[number] - count)
                self.counts[number] -= count
                self.preemptions += 1
                changed.add(number)
        self.devices = n_devices
        chosen = POLICIES[self.policy](self.jobs, self.counts, n_devices, self._find_horizon())
        for number, count in enumerate(chosen):
            if count != self.counts[number]:
                self.rescaling += self._price(number, count)
                self.moves += 1
                # A job that had no device has kept none.
                if self.counts[number]:
                    changed.add(number)
        self.counts = list(chosen)
        self.changes += len(changed)
        self.running_s += span_s * sum(count > 0 for count in self.counts)
        self.worked += span_s * sum(j.weight * j.rate(n) for j, n in zip(self.jobs, self.counts, strict=True))
        return self.worked - self.rescaling - self.preemption

    def judge(self, samples: tuple[float, ...], followed: float, dedicated: float) -> Outcome:
        """Return the outcome of the run.

        - `followed`: the weighted samples of the best counts at each moment
        - `dedicated`: the weighted samples of dedicated devices
        """
        lost = (self.preemption, self.rescaling, followed - self.worked, dedicated - followed)
        return Outcome(
            utilisation=samples[-1] / dedicated,
            losses=dict(zip(CAUSES, (samples / dedicated for samples in lost), strict=True)),
            moves=self.moves,
            preemptions=self.preemptions,
            horizon_s=self._find_horizon(),
            samples=samples,
        )

    def _find_horizon(self) -> float:
        """Return the stated horizon, or for how long a running job has kept its devices so far on average."""
        return self.horizon_s or self.running_s / self.changes

    def _price(self, number: int, count: int) -> float:
        """Return the weighted samples that a move of a job to `count` devices costs."""
        job, current = self.jobs[number], self.counts[number]
        return job.weight * job.rate(current) * job.move_s(current, count)

    def _draw_lost(self, n_devices: int) -> list[int]:
        """Return how many devices each job loses, and idle ones, when all but `n_devices` go."""
        left = [*self.counts, self.devices - sum(self.counts)]
        lost = [0] * len(left)
        for among in range(self.devices, n_devices, -1):
            drawn = self.random.randrange(among)
            for number, count in enumerate(left):
                if drawn < count:
                    left[number] -= 1
                    lost[number] += 1
                    break
                drawn -= count
        return lost[:-1]
