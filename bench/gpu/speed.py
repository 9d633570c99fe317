"""Time training steps of pipelines with stages that share the GPU, and of the unsplit model, in four sizes.

Stages that share a GPU cannot be faster than the model on one. The difference is the cost of the runtime.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bench.gpu.peaks import measure_peak_gib, predict_gib
from bench.gpu.setting import FAST, Setting
from bench.gpu.timing import SIZES, Case, Taken, measure, measure_in_turns
from bench.lib.peers_runtime import torchgpipe_step
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.schedule.generators.catalogue import Scheduler
from fxsplit.schedule.of_plan import build_schedule
from fxsplit.schedule.schedule_plan import simulate_step

CHAIN = "profile{repeats=3},augment,order,partition,emit"
# The most informative pipelines come first, because a size may run out of time.
PIPELINES = (
    (4, "1F1B"),
    (1, "1F1B"),
    (4, "ZB-H1"),
    (4, "GPipe"),
    (2, "1F1B"),
    (2, "ZB-H1"),
    (2, "GPipe"),
    (1, "GPipe"),
    (1, "ZB-H1"),
)
DRY_PIPELINES = ((2, "1F1B"), (2, "ZB-H1"))
PEER = "torchgpipe"
LONGER = 1.3
"""A pipeline is left out unless the time left is this many times the last pipeline's: it may take longer."""


def run_speed(setting: Setting, names: Sequence[str] = ()) -> int:
    """Note the unsplit model and each pipeline of each size; return 0."""
    # Single precision without TF32 is bound by slow products, so that the runtime would not be seen.
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in names or list(SIZES)[: 1 if setting.dry else None]:
        _measure_size(setting, name, 1 if setting.dry else 5 if name.startswith("large") else 10)
        setting.release_memory()
    return 0


def _measure_size(setting: Setting, name: str, rounds: int) -> None:
    """Note the unsplit model's step, the profile, each pipeline, and torchgpipe on the stages of the first one."""
    case = Case.build(setting, name)
    unsplit = measure(setting, case.run_unsplit, rounds)
    peak_gib = measure_peak_gib(setting, case.model, case.run_unsplit)
    _note_step(setting, name, "unsplit", unsplit, unsplit, peak_GiB=peak_gib)
    setting.note("work", size=name, TFLOP=case.flops / 1e12, TFLOP_per_s=case.flops / unsplit.wall_ms / 1e9)
    costs: Costs | None = None
    taken_s = 0.0
    for n_devices, schedule in DRY_PIPELINES if setting.dry else PIPELINES:
        what = f"{n_devices} x {schedule}"
        if setting.findings.seconds_left() < LONGER * taken_s:
            setting.note("left out, as time was short", size=name, pipeline=what)
            continue
        begin = time.perf_counter()
        options = {"schedule": schedule, "example_inputs": case.x, "costs": costs}
        with setting.compile(
            case.model, n_devices, case.n_microbatches, passes=FAST if setting.dry else CHAIN, **options
        ) as pipe:
            if costs is None:
                costs = pipe.costs
                _note_profile(setting, case, costs, unsplit, time.perf_counter() - begin)
            _measure_pipeline(setting, name, case, pipe, Scheduler(schedule, n_devices), rounds)
            if n_devices > 1 and schedule == "1F1B":
                _measure_peer(setting, name, case, pipe, rounds)
        # The first pipeline measures the costs, which serve all later pipelines.
        taken_s = time.perf_counter() - begin


def _note_profile(setting: Setting, case: Case, costs: Costs, unsplit: Taken, seconds: float) -> None:
    """Note the profile's time for the whole model, over the model's measured time."""
    n = case.n_microbatches
    values: dict[str, Any] = {"nodes": len(costs.nodes), "compile_s": seconds}
    values |= {"nodes_compute_ms": n * costs.compute_ms, "nodes_launch_ms": n * costs.launch_ms}
    setting.note("profile", **values, of_unsplit=n * costs.total_ms / unsplit.wall_ms)


def _note_step(setting: Setting, size: str, what: str, taken: Taken, unsplit: Taken, **more: float) -> None:
    """Note the time of a step: a row of the README's table."""
    times = {"host_ms": taken.host_ms, "wall_ms": taken.wall_ms, "GPU_ms": taken.gpu_ms}
    setting.note("steps", size=size, pipeline=what, **times, percent_kept=100 * unsplit.wall_ms / taken.wall_ms, **more)


def _measure_pipeline(
    setting: Setting, name: str, case: Case, pipe: Pipeline, scheduler: Scheduler, rounds: int
) -> None:
    """Note a pipeline's step, the unsplit model's step in turns with it, and the predicted step."""

    def step() -> None:
        pipe.zero_grad()
        pipe.step(case.x, target=case.y)

    setting.release_memory()
    taken, unsplit = measure_in_turns(setting, [step, case.run_unsplit], rounds)
    apart_ms = predict_ms(pipe, scheduler, case.n_microbatches)
    # Stages that share a GPU take turns on it, so no step is shorter than all of its work.
    shared_ms = max(apart_ms, case.n_microbatches * pipe.plan.single_ms)
    predicted = {"predicted_ms": shared_ms, "predicted_apart_ms": apart_ms, "predicted_peak_GiB": predict_gib(pipe)}
    what = f"{scheduler.n_devices} x {scheduler.name}"
    _note_step(setting, name, what, taken, unsplit, peak_GiB=measure_peak_gib(setting, case.model, step), **predicted)


def _measure_peer(setting: Setting, name: str, case: Case, pipe: Pipeline, rounds: int) -> None:
    """Note torchgpipe's step on copies of the same stages, or the reason why it was not run."""
    if find_spec(PEER) is None:
        setting.note("beside others", size=name, pipeline=PEER, left_out="it is not installed here")
        return
    what = f"{len(pipe.stages.stages)} x {PEER}"
    try:
        # Copies, so that torchgpipe adds nothing to the pipeline's gradients.
        stages = nn.ModuleList(copy.deepcopy(stage.module) for stage in pipe.stages.stages)
        train = torchgpipe_step(list(stages), case.n_microbatches, case.x, case.y, [setting.name] * len(stages))

        def step() -> None:
            stages.zero_grad()
            train()

        taken, unsplit = measure_in_turns(setting, [step, case.run_unsplit], rounds)
        _note_step(setting, name, what, taken, unsplit, peak_GiB=measure_peak_gib(setting, case.model, step))
    except Exception as error:  # an error of torchgpipe is a finding, and does not end this size
        setting.note("beside others", size=name, pipeline=what, left_out=f"{type(error).__name__}: {str(error)[:200]}")


def predict_ms(pipe: Pipeline, scheduler: Scheduler, n_microbatches: int) -> float:
    """Return the step time that the plan predicts, in milliseconds, as if each stage had a device."""
    # Without sharing: stages that share a GPU take at least the sum of their work.
    schedule = build_schedule(pipe.plan, scheduler, n_microbatches)
    return simulate_step(pipe.plan, schedule)
