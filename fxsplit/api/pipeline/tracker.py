"""Report figures of measured training batches to an experiment tracker: step, idle share, stage times, memory.

    pipe.step(x, target=y)            timed, then reported when the step is over
    pipe(x), then loss.backward()     both timed, then reported at the next call of the pipeline

A batch is reported in the thread that calls the pipeline, never in a thread of autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

import torch

from fxsplit.errors import InputError
from fxsplit.runtime.job.stopwatch import Keep, Stopwatch
from fxsplit.runtime.program import Program
from fxsplit.system.figures import is_count, show
from fxsplit.system.user_lines import warn_user

GB = 1e9

Receiver: TypeAlias = Callable[[Mapping[str, float], int], object]
"""Receives the figures of a batch, by name, and the number of the batch."""


class Tracker:
    """Times every N-th training batch of a pipeline, and reports its figures.

    to: a function of (figures, number of the batch), a `SummaryWriter`, or a logger of Lightning.
    every: N. With 10, batches 1, 11, 21 and so on are timed.
    Raises InputError for another `to` or `every`.
    """

    def __init__(self, to: Any, every: int) -> None:
        if not is_count(every, least=1):
            raise InputError(f"every={show(every)}: give a number of batches, such as 10")
        self._report, self._every = find_receiver(to), every
        self._numbers = count(1)
        # Autograd's thread appends, and callers of the pipeline pop: a deque needs no lock for either.
        self._ended: deque[tuple[int, Program, Sequence[Stopwatch]]] = deque()

    def begin(self, program: Program) -> Keep | None:
        """Begin a training batch: return a function that keeps its stopwatches, or None if it is not to be timed."""
        number = next(self._numbers)
        if (number - 1) % self._every:
            return None
        return lambda watches: self._ended.append((number, program, watches))

    def deliver(self) -> None:
        """Report the batches that have ended. An error of the tracker is only a warning: the step is done."""
        while self._ended:
            try:
                number, program, watches = self._ended.popleft()
            except IndexError:  # another thread has reported it
                return
            try:
                self._report(measure(program, watches), number)
            except Exception as error:
                warn_user(f"the figures of batch {number} were not tracked ({type(error).__name__}: {error})")


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

    - `fxsplit/step_ms`: from the first action to the last; `fxsplit/predicted_step_ms`: as the plan predicts it
    - `fxsplit/bubble`: the idle share of the devices, from 0 to 1
    - `fxsplit/stage_0_ms` and so on: what the devices of a stage have computed, in all microbatches and replicas
    - `fxsplit/memory_gb/cuda:0` and so on: the most memory that torch has held on an accelerator, in 10^9 bytes

    Over ranks the figures are of this rank's own device and stages.
    """
    plan = program.plan
    busy = {stage.index: 0.0 for stage in program.stages.stages}
    step_ms, devices = 0.0, set[int]()
    for timeline in (watch.make_timeline(tuple(d.name for d in program.machine.devices)) for watch in watches):
        step_ms += timeline.length_ms
        for device, spans in enumerate(timeline.spans):
            for span in spans:
                busy[span.action.stage] += span.end_ms - span.begin_ms
                devices.add(device)
    figures = {"fxsplit/step_ms": step_ms}
    if plan.step_ms is not None:
        figures["fxsplit/predicted_step_ms"] = plan.step_ms
    if step_ms:
        figures["fxsplit/bubble"] = 1.0 - sum(busy.values()) / (step_ms * len(devices))
    figures |= {f"fxsplit/stage_{stage}_ms": ms for stage, ms in busy.items() if ms}
    used = [program.devices[device] for device in sorted(devices)]
    for name in dict.fromkeys(str(device) for device in used if device.type != "cpu"):
        figures[f"fxsplit/memory_gb/{name}"] = torch.accelerator.max_memory_allocated(name) / GB
    return figures
