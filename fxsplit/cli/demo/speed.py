"""The speed of the demo's pipeline: steps as predicted and as measured, and why the two differ."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.plan import format_spread
from fxsplit.schedule.schedule_plan import state_step
from fxsplit.system.figures import format_count
from fxsplit.system.shown import Parts, Table

TIMED_STEPS = 4
"""How many steps are timed of each: the pipeline, and the model on one thread and on all. The first warms up."""
CLOSE = 0.1
"""A measured step this close to the predicted one, as a share of it, needs no reason."""


@dataclass(frozen=True)
class Speed:
    """Times of a step on a whole batch, in ms.

    step_ms, unsplit_ms, all_threads_ms: of the pipeline, of the model with the threads of one device, and with all.
    predicted_ms, spread: of the pipeline by its plan, and by what share the measured costs of the plan vary.
    work_ms, cpu_ms: the computing of all devices in a step by the plan, and the time that threads ran in it.
    """

    rows: int
    devices: int
    threads: int
    cores: int
    step_ms: float
    unsplit_ms: float
    all_threads_ms: float
    predicted_ms: float
    spread: float | None
    work_ms: float
    cpu_ms: float

    def show(self) -> Parts:
        """Yield a table of predicted and measured figures, and the reasons for a difference."""
        times = self.predicted_ms, self.step_ms
        both = [
            ("a step, ms", f"{self.predicted_ms:.1f}{format_spread(self.spread)}", f"{self.step_ms:.1f}"),
            ("images per second", *(f"{1000.0 * self.rows / ms:.0f}" for ms in times)),
            ("x one device", f"{self.work_ms / self.predicted_ms:.2f}", f"{self.unsplit_ms / self.step_ms:.2f}"),
        ]
        yield Table(("", ">predicted", ">measured"), both)
        threads, cores = format_count(self.threads, "thread"), format_count(self.cores, "core")
        yield f"a device has {threads} of {cores}; with all of them the model takes {self.all_threads_ms:.1f} ms a step"
        yield from self.explain()

    def explain(self) -> list[str]:
        """Return why a measured step differs from the predicted one, in one line for each reason; empty if it does not.

        A step that waits for a core takes no more computing than was planned. Computing that takes longer is slower
        itself: the profile measures one operator at a time, and in a step all devices share memory and caches.
        """
        off, slower = self.step_ms / self.predicted_ms - 1.0, self.cpu_ms / self.work_ms - 1.0
        if abs(off) <= max(CLOSE, self.spread or 0.0):
            return []
        if off < 0:
            return [f"{off:.0%}: the machine was busier, or slower, while operators were profiled"]
        reasons, crowded = [], self.cores < self.devices * self.threads
        if crowded:
            devices, cores = format_count(self.devices, "device"), format_count(self.cores, "core")
            reasons.append(f"{devices} share {cores} of the machine")
        if slower > CLOSE:
            reasons.append(
                f"operators compute {slower:.0%} longer than in the profile: devices share memory and caches"
            )
        # What the threads neither computed nor were planned to wait is time without a core.
        waited = self.step_ms - self.predicted_ms * (1.0 + max(0.0, slower))
        if waited > CLOSE * self.predicted_ms and not crowded:
            reasons.append(f"threads wait {waited:.0f} ms of a step for a core: other programs run")
        small = (
            f"operators compute {slower:+.0%} beside the profile, and threads wait {max(0.0, waited):.0f} ms of a step"
        )
        return [f"{off:+.0%}: {reason}" for reason in reasons or [small]]


def measure_speed(pipe: Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> Speed:
    """Time steps of the pipeline and of a copy of `model` on the batch x, y, in turns: a busy machine slows down both.

    Medians count. Weights and gradients stay as they are.
    """
    unsplit = copy.deepcopy(model)
    threads, everything = pipe.ir[Machine].intraop_threads(), torch.get_num_threads()
    state = copy.deepcopy(pipe.state_dict())
    samples = []
    for _ in range(TIMED_STEPS):
        split_ms, cpu_ms = _time(lambda: pipe.step(x, target=y))
        torch.set_num_threads(threads)
        unsplit_ms, _ = _time(lambda: F.cross_entropy(unsplit(x), y).backward())
        torch.set_num_threads(everything)
        all_ms, _ = _time(lambda: F.cross_entropy(unsplit(x), y).backward())
        samples.append((split_ms, cpu_ms, unsplit_ms, all_ms))
    # The timed steps have changed the running statistics of batch norms.
    pipe.load_state_dict(state)
    pipe.zero_grad()
    # The first step of each warms up.
    split_ms, cpu_ms, unsplit_ms, all_ms = (median(column[1:]) for column in zip(*samples, strict=True))
    plan = state_step(pipe.plan)
    assert plan.step_ms is not None
    return Speed(
        rows=len(x),
        devices=len(plan.stages),
        threads=threads,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        step_ms=split_ms,
        unsplit_ms=unsplit_ms,
        all_threads_ms=all_ms,
        predicted_ms=plan.step_ms,
        spread=plan.spread,
        work_ms=plan.n_microbatches * plan.single_ms,
        cpu_ms=cpu_ms,
    )


def _time(call: Callable[[], object]) -> tuple[float, float]:
    """Return the time of a call, and the time that all threads of this process computed in it, in ms."""
    begin, computed = time.perf_counter(), time.process_time()
    call()
    return 1000.0 * (time.perf_counter() - begin), 1000.0 * (time.process_time() - computed)
