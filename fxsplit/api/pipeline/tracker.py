"""Report figures of measured training batches to an experiment tracker: step, idle share, stage times, memory.

    pipe.step(x, target=y)            timed, then reported when the step is over
    pipe(x), then loss.backward()     both timed, then reported at the next call of the pipeline

A batch is reported in a thread that calls the pipeline, never in a thread of autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeAlias

import torch

from fxsplit.errors import InputError, ScheduleError
from fxsplit.runtime.job.stopwatch import Stopwatch, Timing
from fxsplit.runtime.program import Program
from fxsplit.schedule import Schedule
from fxsplit.schedule.action import COMPUTES
from fxsplit.schedule.schedule_plan import simulate_step
from fxsplit.system.figures import is_count, show
from fxsplit.system.logs import format_error
from fxsplit.system.user_lines import warn_user

GB = 1e9

Receiver: TypeAlias = Callable[[Mapping[str, float], int], object]
"""Receives the figures of a batch, by name, and the number of the batch."""


class Tracker:
    """Times every N-th training batch of a pipeline, and reports its figures. Batches are numbered as they end.

    to: a function of (figures, number of the batch), a `SummaryWriter`, or a logger of Lightning.
    every: N. With 10, batches 1, 11, 21 and so on are timed.
    Raises InputError for another `to` or `every`.
    """

    def __init__(self, to: Any, every: int) -> None:
        if not is_count(every, least=1):
            raise InputError(f"every={show(every)}: give a number of batches, such as 10")
        self._report, self._every = find_receiver(to), every
        self._n_ended = 0
        # Autograd's thread appends, and callers of the pipeline pop: a deque needs no lock for either.
        self._ended: deque[tuple[int, Program, Sequence[Stopwatch]]] = deque()
        self._delivering = Lock()
        self._predicted: dict[int, tuple[Schedule, float | None]] = {}

    def begin(self, program: Program) -> Timing:
        """Return the timing of a training batch that begins."""

        def tell(watches: Sequence[Stopwatch]) -> None:
            self._n_ended += 1
            if watches:
                self._ended.append((self._n_ended, program, watches))

        return Timing(tell, is_timed=self._n_ended % self._every == 0)

    def deliver(self) -> None:
        """Report the batches that have ended. An error of the tracker is only a warning: the batch is done."""
        # `to` may itself call the pipeline, and other threads may. Whoever comes later leaves it to the first.
        if not self._delivering.acquire(blocking=False):
            return
        try:
            for _ in range(len(self._ended)):
                number, program, watches = self._ended.popleft()
                try:
                    self._report(self._measure(program, watches), number)
                except Exception as error:
                    # Without the number, so that Python shows an error that repeats only once.
                    warn_user(f"the figures of a batch were not tracked ({format_error(error)})")
        finally:
            self._delivering.release()

    def _measure(self, program: Program, watches: Sequence[Stopwatch]) -> dict[str, float]:
        """Return the figures of a batch, with the time that its plan predicts for it, if that can be simulated."""
        predicted = [self._predict(program, watch.schedule) for watch in watches]
        figures = measure(program, watches)
        known = [ms for ms in predicted if ms is not None]
        return figures | ({"fxsplit/predicted_step_ms": sum(known)} if len(known) == len(predicted) else {})

    def _predict(self, program: Program, schedule: Schedule) -> float | None:
        """Return the simulated time of a schedule in ms, if it can be simulated. Simulates each schedule once."""
        known = self._predicted.get(id(schedule))
        if known is None:
            try:
                known = schedule, simulate_step(program.plan, schedule)
            except ScheduleError:
                known = schedule, None
            # The schedule is kept, since its id would be that of another one later.
            self._predicted[id(schedule)] = known
        return known[1]


def find_receiver(to: Any) -> Receiver:
    """Return `to` as a function of (figures, number of the batch). Raises InputError for an object of another type."""
    add_scalar, log_metrics = getattr(to, "add_scalar", None), getattr(to, "log_metrics", None)
    if callable(add_scalar):  # TensorBoard's SummaryWriter

        def add_each(figures: Mapping[str, float], number: int) -> None:
            for name, value in figures.items():
                add_scalar(name, value, number)

        return add_each
    if callable(log_metrics):  # a logger of Lightning
        return lambda figures, number: log_metrics(dict(figures), number)
    if not callable(to):
        raise InputError(
            f"to={show(to)}: give a function of (figures, number of the batch), such as "
            "lambda figures, number: run.log(figures), or a SummaryWriter, or a logger of Lightning"
        )
    receiver: Receiver = to
    return receiver


def measure(program: Program, watches: Sequence[Stopwatch]) -> dict[str, float]:
    """Return the figures of a training batch by name. Its jobs are a step, or a forward and a backward.

    - `fxsplit/step_ms`: from the first action of a job to the last, summed over the jobs
    - `fxsplit/bubble`: the share of this time in which devices compute nothing, from 0 to 1
    - `fxsplit/stage_0_ms` and so on: what the devices of a stage have computed, in all microbatches and replicas
    - `fxsplit/memory_gb/cuda:0` and so on: the most memory that torch has held on an accelerator, in 10^9 bytes

    Over ranks the figures are of this rank's own device and stages, and the time ends with its own last action.
    """
    names = tuple(d.name for d in program.machine.devices)
    timelines = [watch.make_timeline(names) for watch in watches]
    busy = {stage.index: 0.0 for stage in program.stages_here}
    for span in (span for timeline in timelines for row in timeline.spans for span in row):
        if span.action.op in COMPUTES:
            busy[span.action.stage] += span.end_ms - span.begin_ms
    step_ms = sum(timeline.length_ms for timeline in timelines)
    devices = [d for d in range(max(watch.schedule.n_devices for watch in watches)) if program.runs(d)]
    figures = {"fxsplit/step_ms": step_ms}
    if step_ms and devices:
        figures["fxsplit/bubble"] = 1.0 - sum(busy.values()) / (step_ms * len(devices))
    figures |= {f"fxsplit/stage_{stage}_ms": ms for stage, ms in busy.items()}
    used = [program.devices[device] for device in devices]
    for name in dict.fromkeys(str(device) for device in used if device.type != "cpu"):
        figures[f"fxsplit/memory_gb/{name}"] = torch.accelerator.max_memory_allocated(name) / GB
    return figures
