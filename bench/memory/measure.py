"""Measure the memory of every worker in a training step, action by action, and the plan's figure for it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage

from bench.memory.counter import find_slot, start_counting
from bench.memory.live import Log, Storage, log_storages
from bench.memory.order import RunAhead
from fxsplit.api.compiler.compiler import get_mode
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.ir.facts.stages import list_weights
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.program import Program
from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.schedule.action import Action


@dataclass
class Peak:
    """The peak memory of a worker, in bytes, and the action that reached it.

    held: all bytes of the worker's stages at the peak: weights, buffers, the optimizer's state, and all that it
    allocated. sums: the sums of gradients before the action. before: all bytes before the action. storages: the
    storages that were made in the step, if they are logged.
    """

    held: int = 0
    sums: int = 0
    before: int = 0
    action: str = ""
    storages: Counter[Storage] = field(default_factory=Counter)


@dataclass
class Watch:
    """Follows the actions of all workers. By worker, `traces` has the peak of each action, and `peaks` the highest."""

    peaks: dict[int, Peak] = field(default_factory=dict)
    traces: dict[int, list[Peak]] = field(default_factory=dict)

    def wrap(
        self, do: Callable[[Job, Action, int, DeviceStream], None]
    ) -> Callable[[Job, Action, int, DeviceStream], None]:
        """Return a handler that also notes the worker's memory in each action."""
        counter = start_counting()

        def watched(job: Job, action: Action, device: int, stream: DeviceStream) -> None:
            slot = device + 1
            counter.choose_slot(slot)
            counter.forget_most(slot)
            before, sums = counter.count_live(slot), _count_sums(job, device)
            do(job, action, device, stream)
            peak = Peak(counter.count_most(slot), sums, before, str(action))
            self.traces.setdefault(device, []).append(peak)
            if device not in self.peaks or peak.held > self.peaks[device].held:
                self.peaks[device] = peak

        return watched


def _count_sums(job: Job, device: int) -> int:
    """Return the bytes of all sums of gradients that a job has on a device."""
    pairs = zip(job.schedule.homes, job.sums, strict=True)
    sums = [s for home, parts in pairs for d, s in zip(home, parts, strict=True) if d == device]
    return sum(total.untyped_storage().nbytes() for s in sums for total in s.totals.values())


def _receive_copies(stream: DeviceStream, values: Any, token: Any = None) -> list[Any]:
    """Return copies of values, as a device receives them; CPU workers of one process would share memory."""
    return [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in values]


@contextmanager
def watch_workers(first: int) -> Iterator[Watch]:
    """Watch every worker inside the block, and give it memory of its own for everything that it receives.

    The worker `first` runs ahead of the other workers, so that its messages are taken as late as possible (see
    order.py).
    """
    watch, order = Watch(), RunAhead(first)
    with ExitStack() as stack:
        handlers = {op: order.wrap(watch.wrap(do)) for op, do in Job.HANDLERS.items()}
        stack.enter_context(order.lead())
        stack.enter_context(mock.patch.object(Job, "HANDLERS", handlers))
        stack.enter_context(mock.patch.object(DeviceStream, "receive", _receive_copies))
        yield watch


def measure_step(
    pipe: Pipeline, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, *, asynchronous: bool, live: bool = False
) -> tuple[list[Peak], Watch]:
    """Return the peak of every worker in a step that begins without gradients, and all actions that were watched.

    live: list the storages of each peak, too.
    """
    # Live storages of earlier pipelines' workers do not count for this pipeline, which has run nothing yet.
    gc.collect()
    counter = start_counting()
    earlier = [counter.count_live(device + 1) for device in range(len(pipe.plan.device_names))]
    peaks: dict[int, Peak] = {}
    optimizer.zero_grad()
    # A first step makes the optimizer's state, and everything else that lasts from step to step. If weight versions are
    # kept, it moves weights and counts them for their worker.
    with watch_workers(0):
        pipe.step(x, target=y, optimizer=optimizer if asynchronous else None)
    if not asynchronous:
        optimizer.step()
    # A plan may have more stages than devices.
    for first in range(find_program(pipe).schedule(pipe.plan.n_microbatches).n_devices):
        optimizer.zero_grad()
        with log_storages() if live else nullcontext(Log()) as log, watch_workers(first) as watch:
            pipe.step(x, target=y, optimizer=optimizer if asynchronous else None)
        peaks[first] = replace(watch.peaks[first], storages=log.storages.get(first, Counter()))
        if not asynchronous:
            optimizer.step()
    optimizer.zero_grad()
    program, found = find_program(pipe), []
    for device, peak in sorted(peaks.items()):
        more = count_static(program, device, optimizer) - earlier[device]
        found.append(replace(peak, held=peak.held + more, before=peak.before + more))
    return found, watch


def find_program(pipe: Pipeline) -> Program:
    """Return the program of a pipeline's training mode, which must be compiled."""
    compiled = pipe.compiler.get_compiled(get_mode(pipe.model))
    assert compiled is not None
    return compiled.program


def count_static(program: Program, device: int, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a device's weights, buffers and optimizer state that its worker did not allocate."""
    homes = program.schedule(program.plan.n_microbatches).homes
    weights = [
        w
        for stage, home in zip(program.stages.stages, homes, strict=True)
        if device in home
        for w in list_weights(stage.module)
    ]
    state = [t for w in weights for t in optimizer.state.get(w, {}).values() if isinstance(t, Tensor)]
    storages: dict[int, UntypedStorage] = {}
    for tensor in (*weights, *state):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    return sum(s.nbytes() for s in storages.values() if find_slot(s) != device + 1)
