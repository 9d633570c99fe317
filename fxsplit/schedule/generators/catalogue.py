"""The schedules by name, and their demands on the machine and on the memory of stages.

For example, under 1F1B on 2 devices with 4 microbatches the first stage holds the activations of 2 microbatches at
once, and the second stage those of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, TypeAlias, get_args

from fxsplit.errors import ScheduleError, suggest
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.workload import Workload
from fxsplit.ir.facts.memory.moments import Moments
from fxsplit.schedule.generators.asynchronous import pipedream, pipedream_2bw
from fxsplit.schedule.generators.blocks import v_half, v_min
from fxsplit.schedule.generators.dual_pipe import dual_pipe_v
from fxsplit.schedule.generators.synchronous import (
    append_sums,
    chimera,
    gpipe,
    inference,
    interleaved,
    looped_bfs,
    one_f_one_b,
    run_forwards_first,
)
from fxsplit.schedule.generators.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2, zbv
from fxsplit.schedule.moments import list_moments
from fxsplit.schedule.schedule import Homes, Schedule
from fxsplit.schedule.simulation.simulate import Times
from fxsplit.schedule.torch_csv import check_exportable, format_csv, parse_csv
from fxsplit.system.figures import show

Runnable = Literal[
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "ZB-H1",
    "ZB-H2",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "V-Half",
    "V-Min",
    "DualPipeV",
    "Chimera",
]
Asynchronous = Literal["PipeDream", "PipeDream-2BW"]
ScheduleName: TypeAlias = Literal[Runnable, Asynchronous, "search"]
"""The names of schedules, for type checkers and editors."""

Generator = Callable[..., Schedule]
"""A function of n_devices, n_microbatches and optionally stages_per_device and times that returns a schedule."""

SCHEDULES: dict[str, Generator] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "LoopedBFS": looped_bfs,
    "Interleaved1F1B": interleaved,
    "ZB-H1": zb_h1,
    "ZB-H2": zb_h2,
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZBVZeroBubble": zbv,
    "V-Half": v_half,
    "V-Min": v_min,
    "DualPipeV": dual_pipe_v,
    "Chimera": chimera,
    "PipeDream": pipedream,
    "PipeDream-2BW": pipedream_2bw,
}
"""Every schedule, by torch's name if torch has it."""

INFERENCE = "Inference"
"""The schedule of plans for outputs without gradients, which is no schedule of a training step."""
SEARCH = "search"
"""The schedule that a search finds for the times of a plan. Until then, and for other numbers of microbatches than the
plan's, it is 1F1B.
"""
HELD = 3
"""The most microbatches with values at the boundaries of a stage without gradients: one that runs, one that has
arrived, and, in a stream, one of the next batch.
"""

FROM_TIMES = ("ZB-H2", "InterleavedZeroBubble", "ZBVZeroBubble", "V-Half", "V-Min")
"""Schedules with an order that depends on the times of the stages."""
SPLITTING = ("ZB-H1", *FROM_TIMES, "DualPipeV")
"""Schedules with split backwards: input gradients first, weight gradients later. DualPipeV splits only some."""

MOST_ACTIONS = 1_000_000
"""Schedules with more actions are refused, since their lists would exhaust memory."""

RUNNABLE: tuple[Runnable, ...] = get_args(Runnable)
"""Schedules with one optimizer step after the whole batch. Their gradients equal the unsplit model's."""
ASYNCHRONOUS: tuple[Asynchronous, ...] = get_args(Asynchronous)
"""Schedules in which the optimizer steps between microbatches."""

# Counting actions takes 1.6 s for all pipelines of up to 64 stages, and a plan may be for 512.
COUNTED: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "GPipe": lambda k, m: (m,) * k,
    "1F1B": lambda k, m: tuple(min(m, k - stage) for stage in range(k)),
    "ZB-H1": lambda k, m: (min(m, k),) * k,
    "ZB-H2": lambda k, m: (min(m, 2 * k),) * k,
    SEARCH: lambda k, m: tuple(min(m, k - stage) for stage in range(k)),
    INFERENCE: lambda k, m: (HELD,) * k,
}
"""Formulas for `Scheduler.in_flight` with k stages and m microbatches, for the schedules that have one."""


def find_schedule(name: str, among: tuple[str, ...] = tuple(SCHEDULES)) -> Generator:
    """Return the generator of the schedule called `name`. Raises ScheduleError, with all names, for an unknown name."""
    if name == SEARCH and among == tuple(SCHEDULES):
        return one_f_one_b
    there = isinstance(name, str) and name in SCHEDULES
    if there and name in among:
        return SCHEDULES[name]
    if there:
        raise ScheduleError(f"schedule {name!r} can be simulated but not used here: give {', '.join(among)}")
    if name == INFERENCE:
        raise ScheduleError(f"schedule {name!r} trains nothing: plan and compile with inference=True instead")
    known = (*among, SEARCH) if among == tuple(SCHEDULES) else among
    raise ScheduleError(f"unknown schedule {show(name)}: known are {', '.join(known)}{suggest(name, known)}")


def generate(
    name: str,
    n_devices: int,
    n_microbatches: int,
    stages_per_device: int | None = None,
    times: Times | None = None,
) -> Schedule:
    """Return the schedule called `name` for numbers of devices and microbatches.

    - `stages_per_device` defaults to the schedule's own number
    - `times`: the times of the stages (default: a forward, an input gradient and a weight gradient take equal times).
      Only the schedules in FROM_TIMES use the times: they put weight gradients into the idle time of devices

    Raises ScheduleError for an unknown name, for numbers that the schedule does not support, and if `times` is for a
    different number of stages.
    """
    if times is None or name not in FROM_TIMES:
        return _generate(name, n_devices, n_microbatches, stages_per_device)
    return _prepare(name, n_devices, n_microbatches, stages_per_device)(times=times)


# Every training step calls this, and so does the choice among many schedules.
@lru_cache(maxsize=256)
def _generate(name: str, n_devices: int, n_microbatches: int, stages_per_device: int | None) -> Schedule:
    """Return a schedule for equal times; raises ScheduleError as `generate` does."""
    return _prepare(name, n_devices, n_microbatches, stages_per_device)()


def _prepare(name: str, n_devices: int, n_microbatches: int, stages_per_device: int | None) -> Callable[..., Schedule]:
    """Return the generator of a schedule with its numbers filled in. Raises ScheduleError for unsupported numbers."""
    generator = inference if name == INFERENCE else find_schedule(name)
    if name == SEARCH and stages_per_device not in (None, 1):
        raise ScheduleError(
            f"{SEARCH}: {stages_per_device} stages a device: plans with a searched schedule have one "
            "(fxsplit.schedule.search takes two)"
        )
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
    stated = () if stages_per_device is None else (stages_per_device,)
    return partial(generator, n_devices, n_microbatches, *stated)


def count_devices(name: str, n_stages: int, stages_per_device: int | None = None) -> int:
    """Return the number of devices for a schedule of `n_stages` stages: fewer than stages if each device has several.

    Raises ScheduleError for an unsupported number of stages.
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
    """A schedule for a number of devices. Its methods raise ScheduleError for unsupported numbers.

    `fixed`: the schedule itself, in place of one that is generated; it has one number of microbatches and stages. A
    searched one runs other numbers of microbatches on the same devices, all forwards before all backwards.
    """

    name: str
    n_devices: int
    stages_per_device: int | None = None
    fixed: Schedule | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> Scheduler:
        """Return the scheduler of a schedule that is stated action by action."""
        return cls(schedule.name, schedule.n_devices, None, schedule)

    def schedule(self, n_microbatches: int, n_stages: int | None = None) -> Schedule:
        """Return the schedule for `n_stages` stages (default: all), perhaps with idle devices."""
        if self.fixed is not None:
            if self._is_searched and n_stages in (None, self.fixed.n_stages) and n_microbatches > 0:
                return self._run_forwards_first(self.fixed, n_microbatches)
            if (n_microbatches, n_stages or self.fixed.n_stages) != (self.fixed.n_microbatches, self.fixed.n_stages):
                raise ScheduleError(
                    f"{self.name} is for {self.fixed.n_microbatches} microbatches in {self.fixed.n_stages} stages, not "
                    f"for {n_microbatches} in {n_stages or self.fixed.n_stages}: give n_microbatches="
                    f"{self.fixed.n_microbatches}, and a plan of {self.fixed.n_stages} stages"
                )
            return self.fixed
        # With one stage a device, a plan may leave devices idle; with several, it must have all stages.
        made = generate(self.name, self.n_devices, n_microbatches, self.stages_per_device)
        if n_stages is None or n_stages == made.n_stages:
            return made
        if made.n_stages != self.n_devices or n_stages > self.n_devices:
            raise ScheduleError(
                f"{self.name} on {self.n_devices} devices has {made.n_stages} stages, and the plan {n_stages}: let the "
                "plan use every device (partition{use_all=true})"
            )
        return generate(self.name, n_stages, n_microbatches, self.stages_per_device)

    @property
    def _is_searched(self) -> bool:
        """Whether the schedule was searched for the times of a plan."""
        return self.fixed is not None and self.name == SEARCH

    @staticmethod
    def _run_forwards_first(fixed: Schedule, n_microbatches: int) -> Schedule:
        """Return a searched schedule, or one for another number of microbatches on the same devices."""
        if n_microbatches == fixed.n_microbatches:
            return fixed
        rows = append_sums(run_forwards_first(fixed.homes, n_microbatches), fixed.homes)
        return Schedule(fixed.name, n_microbatches, fixed.homes, rows)

    def in_flight(self, n_microbatches: int, n_stages: int) -> tuple[int, ...]:
        """Return, for each of `n_stages` stages, the most microbatches with activations at once.

        A plan with an unsupported number of stages cannot run. It counts as holding all microbatches, so that memory is
        never underestimated.
        """
        formula = None if self.fixed else COUNTED.get(self.name)
        if formula is not None and self.stages_per_device in (None, 1) and n_stages <= self.n_devices:
            return formula(n_stages, n_microbatches)
        try:
            return self.schedule(n_microbatches, n_stages).peak_in_flight()
        except ScheduleError:
            return (n_microbatches,) * n_stages

    def versions(self, n_microbatches: int, n_stages: int) -> tuple[int, ...]:
        """Return the number of weight versions that each stage keeps at once, or one for a plan that cannot run."""
        try:
            return self.schedule(n_microbatches, n_stages).weight_versions()
        except ScheduleError:
            return (1,) * n_stages

    def homes(self, n_stages: int | None = None) -> Homes:
        """Return the device of each stage, which does not depend on the number of microbatches."""
        if self.fixed is not None:
            return self.fixed.homes
        # A small schedule suffices. Schedules without a formula may need one microbatch for each device.
        count = 1 if self.name in COUNTED else self.n_devices
        return self.schedule(self.nearest(count), n_stages).homes

    def lay_out(self, machine: Machine, n_microbatches: int, *, may_idle: bool = False) -> tuple[Machine, Workload]:
        """Return the machine with one device for each stage, and the workload that the schedule gives to each stage.

        `may_idle` permits stages without nodes. Raises ScheduleError for unsupported numbers.
        """
        if self.fixed:
            check_exportable(self.fixed)
        if self.fixed or self.name not in COUNTED:
            self.schedule(n_microbatches)
        unrolled = machine.unrolled(self.homes())
        return unrolled, self.describe(len(unrolled), n_microbatches, may_idle=may_idle)

    def describe(self, n_devices: int, n_microbatches: int, *, may_idle: bool = False) -> Workload:
        """Return the workload that the schedule gives to the stages on up to `n_devices` devices, one stage each."""
        homes, counts = self.homes(), range(1, n_devices + 1)
        held = {k: self.in_flight(n_microbatches, k) for k in counts}
        versions = {k: self.versions(n_microbatches, k) for k in counts if self.name in ASYNCHRONOUS}
        replicated = any(len(home) > 1 for home in homes)
        inference = self.name == INFERENCE
        splits = bool(self.fixed.splits) if self.fixed else self.name in SPLITTING
        # A stream of inference batches holds more than the schedule of one batch shows; `held` includes it.
        moments = None if inference else MomentsOf(self, n_microbatches)
        workload = Workload(self.name, n_microbatches, held, may_idle, versions, replicated, inference, splits, moments)
        return replace(workload, schedule_csv=format_csv(self.schedule(n_microbatches))) if self.fixed else workload

    def nearest(self, n_microbatches: int) -> int:
        """Return the largest supported number of microbatches up to `n_microbatches`, or else the next larger one."""
        if self.fixed is not None and not self._is_searched:
            return self.fixed.n_microbatches
        # Prefer fewer: a batch may not have enough rows for more.
        for count in range(n_microbatches, 0, -1):
            with suppress(ScheduleError):
                self.schedule(count)
                return count
        self.schedule(n_microbatches + 1)
        return n_microbatches + 1


@dataclass(frozen=True)
class MomentsOf:
    """The moments of a schedule's stages by the number of stages, computed on demand."""

    scheduler: Scheduler
    n_microbatches: int

    def get(self, n_stages: int, /) -> tuple[Moments, ...] | None:
        """Return the moments of each of `n_stages` stages, or None for an unsupported number."""
        try:
            return _list_moments(self.scheduler, self.n_microbatches, n_stages)
        except ScheduleError:
            return None


def find_moments(workload: Workload, machine: Machine) -> MomentsOf | None:
    """Return the moments of a workload that was read from a file, as `Scheduler.lay_out` would state them.

    `machine` has a device for each stage. Return None if the schedule is unknown, or has a different number of stages.
    """
    if workload.schedule_csv:
        return MomentsOf(Scheduler.of(parse_csv(workload.schedule_csv, workload.schedule)), workload.n_microbatches)
    if workload.inference or workload.schedule not in (*SCHEDULES, SEARCH):
        return None
    count = len(machine.real) or len(machine)
    homes = machine.homes or tuple((i,) for i in range(count))
    for each in (None, len(machine) // count):
        scheduler = Scheduler(workload.schedule, count, each)
        with suppress(ScheduleError):
            if tuple(map(tuple, scheduler.homes())) == homes:
                return MomentsOf(scheduler, workload.n_microbatches)
    return None


# A plan is priced several times, and the choice among schedules prices many.
@lru_cache(maxsize=256)
def _list_moments(scheduler: Scheduler, n_microbatches: int, n_stages: int) -> tuple[Moments, ...]:
    """Return the moments of each of `n_stages` stages. Raises ScheduleError for an unsupported number."""
    return list_moments(scheduler.schedule(n_microbatches, n_stages))
