"""Run a pipeline over four partitions of one GPU; compare it with the unsplit model on one partition and a simulation.

Stages then run at once, as on four GPUs. Stages that share all of a GPU do not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.partitions import Partition, make_partitions
from bench.gpu.setting import FAST, Setting
from bench.gpu.speed import CHAIN, LONGER, predict_ms
from bench.gpu.timing import Case, measure
from fxsplit.passes.profile.thread import run_in_worker_thread
from fxsplit.runtime.stage.streams import AcceleratorStream
from fxsplit.schedule.generators.catalogue import Scheduler

# An H100 has 132 multiprocessors, and partitions come in multiples of 8.
COUNT, MULTIPROCESSORS = 4, 32
# The most informative schedules come first, because a size may run out of time.
SCHEDULES = ("1F1B", "ZB-H1", "Interleaved1F1B", "GPipe", "ZBVZeroBubble", "LoopedBFS", "Chimera")
SIZES = ("large bf16", "middle bf16")
"""Sizes that are bound by the GPU, and not by the host."""


def run_green(setting: Setting, names: Sequence[str] = ()) -> int:
    """Note the unsplit model and each schedule of each size; return 0."""
    partitions = [] if setting.dry else make_partitions(setting, COUNT, MULTIPROCESSORS)
    for name in (names or SIZES)[: 1 if setting.dry else None]:
        case = Case.build(setting, name)
        # A pipeline over all four partitions is measured against the speed of one, as against one of four GPUs.
        with _on_first(partitions):
            unsplit = measure(setting, case.run_unsplit, 1 if setting.dry else 5)
        setting.note("one partition", size=name, pipeline="unsplit", wall_ms=unsplit.wall_ms, host_ms=unsplit.host_ms)
        costs, taken_s = None, 0.0
        for schedule in SCHEDULES[: 2 if setting.dry else None]:
            if setting.findings.seconds_left() < LONGER * taken_s:
                setting.note("left out, as time was short", size=name, pipeline=schedule)
                continue
            begin = time.perf_counter()
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
                # The largest possible gain of a schedule: all work on one device, divided by the simulated step.
                single = case.n_microbatches * pipe.plan.single_ms
            measured = {"wall_ms": taken.wall_ms, "host_ms": taken.host_ms, "speedup": unsplit.wall_ms / taken.wall_ms}
            simulated = {"simulated_ms": predicted, "simulated_speedup": single / predicted}
            setting.note(f"{COUNT} partitions", size=name, pipeline=schedule, **measured, **simulated)
            taken_s = time.perf_counter() - begin
        setting.release_memory()
    return 0


def _on_first(partitions: list[Partition]) -> AbstractContextManager[Any]:
    """Return a context that sends this thread's work to the first partition."""
    return torch.cuda.stream(partitions[0][1]) if partitions else nullcontext()


@contextmanager
def _stages_on(partitions: list[Partition]) -> Iterator[None]:
    """Give workers that start inside the block the streams of the partitions, one after another."""
    if not partitions:
        yield
        return
    streams = itertools.cycle(stream for _, stream in partitions)
    # Workers make their streams as they start, one after another, in the order of the devices.
    create = AcceleratorStream.__init__

    def create_on_next(self: AcceleratorStream, device: torch.device) -> None:
        # Everything else that the constructor sets up stays as it is.
        create(self, device)
        self._stream = to_plain_stream(next(streams))

    with patch.object(AcceleratorStream, "__init__", create_on_next):
        yield


def to_plain_stream(stream: Any) -> torch.Stream:
    """Return a stream of CUDA's as a torch.Stream, whose events work with streams of both kinds."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


@contextmanager
def _profile_inside(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let profiles in the block be measured inside a context, which the thread that measures enters."""

    def in_thread_inside(run: Callable[[], Any], intraop_threads: int, device: torch.device) -> Any:
        # The profile's own thread enters the context, because the current stream belongs to a thread.
        def run_inside() -> Any:
            with context():
                return run()

        return run_in_worker_thread(run_inside, intraop_threads, device)

    with patch("fxsplit.passes.profile.profile.run_in_worker_thread", in_thread_inside):
        yield
