"""The schedules by name, and what each asks of a machine and of the memory of its stages.

For example 1F1B on 2 devices with 4 microbatches: the first stage holds the activations of 2 microbatches at once, the
second those of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from fxsplit.errors import ScheduleError, suggest
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.memory.moments import Moments
from fxsplit.schedule.generators.asynchronous import pipedream, pipedream_2bw
from fxsplit.schedule.generators.synchronous import (
    chimera,
    gpipe,
    inference,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zbv,
)
from fxsplit.schedule.moments import list_moments
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.system.figures import show

Runnable = Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "Chimera"]
Asynchronous = Literal["PipeDream", "PipeDream-2BW"]
ScheduleName: TypeAlias = Literal[Runnable, Asynchronous]
"""The names that schedules have, for checkers of types and for editors."""

Generator = Callable[..., Schedule]
"""A function of n_devices, n_microbatches and optionally stages_per_device that returns a schedule."""

SCHEDULES: dict[str, Generator] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "LoopedBFS": looped_bfs,
    "Interleaved1F1B": interleaved,
    "ZB-H1": zb_h1,
    "ZBVZeroBubble": zbv,
    "Chimera": chimera,
    "PipeDream": pipedream,
    "PipeDream-2BW": pipedream_2bw,
}
"""Every schedule, by torch's name where torch has one."""

INFERENCE = "Inference"
"""What plans for outputs without gradients run under: no schedule of a training step."""
HELD = 3
"""So many microbatches' values lie at the boundaries of a stage without gradients, at most: those of the microbatch in
hand, of one that has arrived, and, in a stream, of one of the next batch."""

SPLITTING = ("ZB-H1", "ZBVZeroBubble")
"""Schedules that divide backwards in two: those of the gradients of inputs, and those of the gradients of weights."""

MOST_ACTIONS = 1_000_000
"""Longer schedules are refused: their lists would fill the memory."""

RUNNABLE: tuple[Runnable, ...] = get_args(Runnable)
"""Schedules whose optimizer steps after the whole batch: their gradients are those of the unsplit model."""
ASYNCHRONOUS: tuple[Asynchronous, ...] = get_args(Asynchronous)
"""Schedules in which the optimizer steps between microbatches."""

# Counting in the list of actions takes 1.6 s for all pipelines of up to 64 stages, and a plan may be for 512.
COUNTED: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "GPipe": lambda k, m: (m,) * k,
    "1F1B": lambda k, m: tuple(min(m, k - stage) for stage in range(k)),
    "ZB-H1": lambda k, m: (min(m, k),) * k,
    INFERENCE: lambda k, m: (HELD,) * k,
}
"""What `Scheduler.in_flight` would count for k stages and m microbatches, for the schedules where a formula says it."""


def find_schedule(name: str, among: tuple[str, ...] = tuple(SCHEDULES)) -> Generator:
    """Return the generator of the schedule called `name`; raises ScheduleError naming those there are."""
    if name in among:
        return SCHEDULES[name]
    if name in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} can be simulated, and does not serve here: give {', '.join(among)}")
    if name == INFERENCE:
        raise ScheduleError(f"schedule {name!r} trains nothing: plan and compile with inference=True in its place")
    raise ScheduleError(f"unknown schedule {show(name)}: known are {', '.join(among)}{suggest(name, among)}")


# Every training step asks for its schedule, and the choice of a schedule for many.
@lru_cache(maxsize=256)
def generate(name: str, n_devices: int, n_microbatches: int, stages_per_device: int | None = None) -> Schedule:
    """Return the schedule called `name`; raises ScheduleError for numbers that it is not made for."""
    generator = inference if name == INFERENCE else find_schedule(name)
    counts = {"devices": n_devices, "microbatches": n_microbatches, "stages a device": stages_per_device}
    for what, count in counts.items():
        if count is not None and count < 1:
            raise ScheduleError(f"{name}: {count} {what}: give at least 1")
    # A stage has at most a forward, an input gradient and a weight gradient for each microbatch.
    actions = 3 * n_devices * n_microbatches * (stages_per_device or 2)
    if actions > MOST_ACTIONS:
        raise ScheduleError(
            f"{name}: {show(n_devices)} devices and {show(n_microbatches)} microbatches are up to {show(actions)} "
            f"actions, more than {MOST_ACTIONS}: give fewer microbatches"
        )
    if stages_per_device is None:
        return generator(n_devices, n_microbatches)
    return generator(n_devices, n_microbatches, stages_per_device)


def count_devices(name: str, n_stages: int, stages_per_device: int | None = None) -> int:
    """Return how many devices run a schedule of `n_stages` stages: fewer than stages if each device has several.

    Raises ScheduleError for a number of stages that the schedule is not made for.
    """
    for each in (1, 2) if stages_per_device is None else (stages_per_device,):
        devices, rest = divmod(n_stages, each)
        if rest or not devices:
            continue
        with suppress(ScheduleError):
            if len(Scheduler(name, devices, stages_per_device).homes()) == n_stages:
                return devices
    find_schedule(name)
    stated = "" if stages_per_device is None else f" with {stages_per_device} stages a device"
    raise ScheduleError(
        f"{name}{stated} does not run {n_stages} stages: plan for it (fxsplit plan --schedule {name} --use-all-devices)"
    )


@dataclass(frozen=True)
class Scheduler:
    """One of the schedules, for a number of devices; raises ScheduleError for numbers that it is not made for."""

    name: str
    n_devices: int
    stages_per_device: int | None = None

    def schedule(self, n_microbatches: int, n_stages: int | None = None) -> Schedule:
        """Return the schedule of `n_stages` (default: all of them); with one a device, fewer devices may take part."""
        # With one stage a device, a plan may leave devices idle; with several, all stages must be there.
        made = generate(self.name, self.n_devices, n_microbatches, self.stages_per_device)
        if n_stages is None or n_stages == made.n_stages:
            return made
        if made.n_stages != self.n_devices or n_stages > self.n_devices:
            raise ScheduleError(
                f"{self.name} on {self.n_devices} devices has {made.n_stages} stages, and the plan {n_stages}: let the "
                "plan use every device (partition{use_all=true})"
            )
        return generate(self.name, n_stages, n_microbatches, self.stages_per_device)

    def in_flight(self, n_microbatches: int, n_stages: int) -> tuple[int, ...]:
        """Return the most microbatches whose activations each of `n_stages` stages holds at once.

        A plan with a number of stages that the schedule is not made for cannot run. It counts as holding all
        microbatches, so that memory is never underestimated.
        """
        formula = COUNTED.get(self.name)
        if formula is not None and self.stages_per_device in (None, 1) and n_stages <= self.n_devices:
            return formula(n_stages, n_microbatches)
        try:
            return self.schedule(n_microbatches, n_stages).peak_in_flight()
        except ScheduleError:
            return (n_microbatches,) * n_stages

    def versions(self, n_microbatches: int, n_stages: int) -> tuple[int, ...]:
        """Return how many versions of its weights each stage keeps at once; one in a plan that could not run."""
        try:
            return self.schedule(n_microbatches, n_stages).weight_versions()
        except ScheduleError:
            return (1,) * n_stages

    def homes(self, n_stages: int | None = None) -> Homes:
        """Return where the stages live, for any number of microbatches."""
        # Where stages live does not depend on the number of microbatches, so a small schedule will do. Those without a
        # formula may need a microbatch for each device.
        count = 1 if self.name in COUNTED else self.n_devices
        return self.schedule(self.nearest(count), n_stages).homes

    def lay_out(self, machine: Machine, n_microbatches: int, *, may_idle: bool = False) -> tuple[Machine, Workload]:
        """Return what to plan for: a machine with a device for each stage, and what the schedule asks of each stage.

        `may_idle` allows stages without a node. Raises ScheduleError for numbers that the schedule is not made for.
        """
        if self.name not in COUNTED:
            self.schedule(n_microbatches)
        homes = self.homes()
        unrolled = machine.unrolled(homes)
        counts = range(1, len(unrolled) + 1)
        held = {k: self.in_flight(n_microbatches, k) for k in counts}
        versions = {k: self.versions(n_microbatches, k) for k in counts if self.name in ASYNCHRONOUS}
        replicated = any(len(home) > 1 for home in homes)
        inference = self.name == INFERENCE
        splits = self.name in SPLITTING
        # Streams hold more than the list of actions of a batch without gradients says: that is in `held`.
        moments = None if inference else MomentsOf(self, n_microbatches)
        return unrolled, Workload(
            self.name, n_microbatches, held, may_idle, versions, replicated, inference, splits, moments
        )

    def nearest(self, n_microbatches: int) -> int:
        """Return the largest number up to `n_microbatches` that the schedule is made for, or else the next."""
        # Fewer than asked for come first: a batch may not have rows for more.
        for count in range(n_microbatches, 0, -1):
            with suppress(ScheduleError):
                self.schedule(count)
                return count
        self.schedule(n_microbatches + 1)
        return n_microbatches + 1


@dataclass(frozen=True)
class MomentsOf:
    """The moments of the stages of a schedule, by how many stages there are; each is found when it is asked for."""

    scheduler: Scheduler
    n_microbatches: int

    def get(self, n_stages: int, /) -> tuple[Moments, ...] | None:
        """Return the moments of each of `n_stages` stages, None where no such schedule is made."""
        try:
            return _list_moments(self.scheduler, self.n_microbatches, n_stages)
        except ScheduleError:
            return None


# A plan is priced several times, and the choice of a schedule prices many.
@lru_cache(maxsize=256)
def _list_moments(scheduler: Scheduler, n_microbatches: int, n_stages: int) -> tuple[Moments, ...]:
    """Return the moments of each of `n_stages` stages; raises ScheduleError where no such schedule is made."""
    return list_moments(scheduler.schedule(n_microbatches, n_stages))
