"""A pipeline over four partitions of one GPU, beside the unsplit model on one of them, and beside its simulation.

Stages then run at once, as on four GPUs, which stages that share all of a GPU do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.partitions import Partition, make_partitions
from bench.gpu.setting import FAST, Setting
from bench.gpu.speed import CHAIN, predict_ms
from bench.gpu.timing import Case, measure
from fxsplit.passes.profile.time_in_step import run_in_worker_thread
from fxsplit.runtime.streams import AcceleratorStream
from fxsplit.schedule.catalogue import Scheduler

# An H100 has 132 multiprocessors, and partitions come in multiples of 8.
COUNT, MULTIPROCESSORS = 4, 32
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble")


def run_green(setting: Setting) -> int:
    """Print a line for each of two sizes and each schedule; return 0."""
    partitions = [] if setting.dry else make_partitions(setting, COUNT, MULTIPROCESSORS)
    for name in ("middle bf16", "large bf16")[: 1 if setting.dry else None]:
        case = Case.build(setting, name)
        # What one of four GPUs would do alone is the measure of a pipeline over all four.
        with _on_first(partitions):
            unsplit = measure(setting, case.run_unsplit, 1 if setting.dry else 5)
        print(f"{name}: unsplit on one partition {unsplit.wall_ms:.1f} ms", flush=True)
        costs = None
        for schedule in SCHEDULES[: 2 if setting.dry else None]:
            with (
                _stages_on(partitions),
                _profile_inside(lambda: _on_first(partitions)),
                setting.compile(
                    case.model,
                    COUNT,
                    case.n_microbatches,
                    schedule=schedule,
                    example_inputs=case.x,
                    costs=costs,
                    passes=FAST if setting.dry else CHAIN,
                ) as pipe,
            ):
                costs = costs or pipe.costs

                def step(pipe: Any = pipe, case: Case = case) -> None:
                    pipe.zero_grad()
                    pipe.step(case.x, target=case.y)

                taken = measure(setting, step, 1 if setting.dry else 5)
                predicted = predict_ms(pipe, Scheduler(schedule, COUNT), case.n_microbatches)
                # What a schedule could gain at most: all work on one device, over its simulated step.
                single = case.n_microbatches * pipe.plan.single_ms
            print(
                f"   {schedule}: {taken.wall_ms:.1f} ms (host {taken.host_ms:.1f}), "
                f"{unsplit.wall_ms / taken.wall_ms:.2f} times as fast as unsplit on one partition; simulated "
                f"{predicted:.1f} ms, {single / predicted:.2f} times",
                flush=True,
            )
        setting.release_memory()
    return 0


def _on_first(partitions: list[Partition]) -> AbstractContextManager[Any]:
    """Return a context in which this thread's work goes to the first partition."""
    return torch.cuda.stream(partitions[0][1]) if partitions else nullcontext()


@contextmanager
def _stages_on(partitions: list[Partition]) -> Iterator[None]:
    """Let the streams of workers that start inside the block be those of the partitions, one after another."""
    if not partitions:
        yield
        return
    streams = itertools.cycle(stream for _, stream in partitions)
    # Workers make their streams as they start, one after another, in the order of the devices.
    create = AcceleratorStream.__init__

    def create_on_next(self: AcceleratorStream, device: torch.device) -> None:
        # What else the constructor sets up stays as it is.
        create(self, device)
        self._stream = next(streams)

    with patch.object(AcceleratorStream, "__init__", create_on_next):
        yield


@contextmanager
def _profile_inside(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let the profile be measured inside a context, which its own thread enters."""

    def in_thread_inside(run: Callable[[], Any], intraop_threads: int) -> Any:
        # The context is entered in the profile's own thread, as the current stream is a thread's.
        def run_inside() -> Any:
            with context():
                return run()

        return run_in_worker_thread(run_inside, intraop_threads)

    with patch("fxsplit.passes.profile.profile.run_in_worker_thread", in_thread_inside):
        yield
