"""Training steps of pipelines whose stages share the GPU, beside the unsplit model's, in four sizes.

Stages that share a GPU cannot be faster than the model alone. How little slower they are is what the runtime costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from bench.gpu.setting import FAST, Setting
from bench.gpu.timing import SIZES, Case, measure
from fxsplit.api.pipeline import Pipeline
from fxsplit.schedule import simulate
from fxsplit.schedule.catalogue import Scheduler
from fxsplit.schedule.of_plan import build_schedule, read_times

CHAIN = "profile{repeats=3},augment,order,partition,emit"
# One stage shows what the runtime costs; four show what stages that wait for each other cost on top.
PIPELINES = ((1, "1F1B"), (2, "1F1B"), (4, "1F1B"), (4, "ZB-H1"), (4, "GPipe"))
DRY_PIPELINES = ((2, "1F1B"), (2, "ZB-H1"))


def run_speed(setting: Setting, names: Sequence[str] = ()) -> int:
    """Print a block of lines for each size; return 0."""
    # Single precision without it is bound by products so slow that the runtime cannot be seen.
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in names or list(SIZES)[: 1 if setting.dry else None]:
        _measure_size(setting, name, 1 if setting.dry else 5 if name.startswith("large") else 10)
        setting.release_memory()
    return 0


def _measure_size(setting: Setting, name: str, rounds: int) -> None:
    """Print the unsplit model's step, the profile, and a line for each pipeline."""
    case = Case.build(setting, name)
    unsplit = measure(setting, case.run_unsplit, rounds)
    print(
        f"{name}: {case.flops / 1e12:.2f} TFLOP a step; unsplit: host {unsplit.host_ms:.1f} ms, wall "
        f"{unsplit.wall_ms:.1f}, GPU {unsplit.gpu_ms:.1f}; {case.flops / unsplit.wall_ms / 1e9:.0f} TFLOP/s; "
        f"peak {_peak_gib(setting, case.run_unsplit):.2f} GiB",
        flush=True,
    )
    costs = None
    for n_devices, schedule in DRY_PIPELINES if setting.dry else PIPELINES:
        begin = time.perf_counter()
        with setting.compile(
            case.model,
            n_devices,
            case.n_microbatches,
            schedule=schedule,
            example_inputs=case.x,
            costs=costs,
            passes=FAST if setting.dry else CHAIN,
        ) as pipe:
            # One profile serves all pipelines of a model: it is the longest part of a compile.
            if costs is None:
                costs = pipe.costs
                total = case.n_microbatches * costs.total_ms
                print(
                    f"   profile: {len(costs.nodes)} nodes in {time.perf_counter() - begin:.1f} s; times of nodes x "
                    f"microbatches {total:.1f} ms, {total / unsplit.wall_ms:.2f} of the unsplit step",
                    flush=True,
                )
            _measure_pipeline(setting, case, pipe, Scheduler(schedule, n_devices), unsplit.wall_ms, rounds)


def _measure_pipeline(
    setting: Setting, case: Case, pipe: Pipeline, scheduler: Scheduler, unsplit_ms: float, rounds: int
) -> None:
    """Print how a pipeline's step compares."""

    def step() -> None:
        pipe.zero_grad()
        pipe.step(case.x, target=case.y)

    setting.release_memory()
    taken = measure(setting, step, rounds)
    print(
        f"   {scheduler.n_devices} stages {scheduler.name}: host {taken.host_ms:.1f} ms, wall {taken.wall_ms:.1f}, GPU "
        f"{taken.gpu_ms:.1f}: {100 * unsplit_ms / taken.wall_ms:.1f} % of unsplit; peak {_peak_gib(setting, step):.2f} "
        f"GiB; {predict_ms(pipe, scheduler, case.n_microbatches):.1f} ms if each stage had a GPU of its own",
        flush=True,
    )


def predict_ms(pipe: Pipeline, scheduler: Scheduler, n_microbatches: int) -> float:
    """Return the step time that the plan predicts, in milliseconds, with a device for each stage."""
    # As if nothing shared the GPU: stages that do share it take at least the sum of their work.
    schedule = build_schedule(pipe.plan, scheduler, n_microbatches)
    return simulate(schedule, read_times(pipe.plan, schedule)).step_ms


def _peak_gib(setting: Setting, run: Callable[[], object]) -> float:
    """Return the most memory that `run` has allocated at once, in GiB; 0 in a dry run."""
    if setting.dry:
        return 0.0
    # The peak of one step alone.
    torch.cuda.reset_peak_memory_stats()
    run()
    setting.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30
