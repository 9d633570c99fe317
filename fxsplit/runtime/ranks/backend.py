"""The backend of a rank: the calling thread runs this rank's row of a schedule while other processes run their rows.

    rank 0:  meet (agree) - run row 0 - end (share loss, outputs, gradients) - each rank adds to .grad
    rank 1:  meet (agree) - run row 1 - end

All ranks begin a job together, and either all or none of them end it successfully.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fxsplit.errors import ClosedError, InputError
from fxsplit.runtime.backends.backend import JobRequest, JobSession
from fxsplit.runtime.job.job import Job, JobHandle
from fxsplit.runtime.job.status import Status, WorkerStatus
from fxsplit.runtime.program import Program
from fxsplit.runtime.ranks.gradients.reduction import GradientReduction
from fxsplit.runtime.ranks.session import RankSession
from fxsplit.runtime.ranks.shared_weights import SharedWeights
from fxsplit.runtime.ranks.weight_placement import WeightPlacement
from fxsplit.runtime.ranks.wire.channels import RankChannels
from fxsplit.runtime.ranks.wire.routes import find_pairs
from fxsplit.runtime.ranks.world.agreement import MASK, Agreement, describe_shapes, sum_values
from fxsplit.runtime.ranks.world.world import World
from fxsplit.runtime.stage.streams import DeviceStream, make_caller_wait, make_stream, mark_caller
from fxsplit.schedule.schedule import Schedule
from fxsplit.torch_internals.autograd.leaves import mute
from fxsplit.torch_internals.random.seeded_calls import new_seed
from fxsplit.torch_internals.scopes.modes import is_autocast_on


class RankBackend:
    """Runs the jobs of one pipeline on this rank.

    label: the pipeline's name, which is the same on all ranks.
    placement: which rank holds each weight. reduction: adds gradients over ranks.
    """

    def __init__(self, world: World, label: str, placement: WeightPlacement, reduction: GradientReduction) -> None:
        self.world = world
        self.placement = placement
        self.agreement = Agreement(world)
        self.channels = RankChannels(world)
        self.reduction = reduction
        stream = make_stream(world.device)
        # The engine expects a stream for each device, but only this rank's device gets work.
        self.streams: list[DeviceStream] = [stream for _ in range(len(world))]
        self._label = label
        self._shared_weights: dict[int, tuple[Program, SharedWeights]] = {}
        self._pairs: dict[int, tuple[Schedule, set[tuple[int, int]]]] = {}
        self._now: tuple[Job, int] | None = None
        self._closed = False

    @contextmanager
    def meet(self, request: JobRequest) -> Iterator[JobSession]:
        """Check that all ranks want the same job, and yield the session for it. An error in the block ends the job."""
        self.check_free()
        with self.world.watch(), ExitStack() as stack:
            session = self._open(request, stack)
            try:
                yield session
            except BaseException:
                self.channels.give_up()
                self.reduction.settle(kept=False)
                raise

    def _open(self, request: JobRequest, stack: ExitStack) -> RankSession:
        """Return a session that all ranks have joined. `stack` gets the contexts to leave at the end of the session."""
        program, schedule = request.batch.program, request.schedule
        # Every rank draws, so that their generators stay equal. A backward repeats the draws of its forward.
        own = new_seed() if request.call != "backward" and program.draws() else 0
        # Pipelines of a mesh have other batches, so their dropout differs too.
        row = self.world.rows.index(self.world.ranks)
        seed = self.agreement.meet(self._list_things(request), own) ^ row
        shared_weights = self._find_shared_weights(program)
        if id(schedule) not in self._pairs:
            # Keep the schedule: a new object could have the id of one that is gone.
            self._pairs[id(schedule)] = schedule, find_pairs(schedule) | shared_weights.pairs
        self.world.open_pairs(self._pairs[id(schedule)][1])
        self.reduction.open_groups(program)
        key = self._find_key(request)
        # All ranks weigh microbatches, but only one rank has each buffer. A backward uses its forward's weights.
        if request.call != "backward" and (counted := program.list_counted()):
            stack.enter_context(self.placement.lend(counted))
        session = RankSession(
            self.channels, request, shared_weights, seed, key, self.run, self.placement, self.reduction
        )
        session.open()
        return session

    def _list_things(self, request: JobRequest) -> dict[str, str | int]:
        """Return the properties of a request that must be equal on all ranks; see `THINGS`."""
        batch, loss = request.batch, request.loss
        target = None if loss is None else loss.target
        return {
            "call": f"{request.call} number {self.world.count(self._label)} of {self._label}",
            "program": batch.program.fingerprint,
            "trained": hash(batch.program.list_flags()) & MASK,
            "modes": str((torch.is_grad_enabled(), is_autocast_on([self.world.device.type]), request.keep_outputs)),
            "inputs": f"{describe_shapes(batch.tensors)} in {len(batch.rows)} microbatches, {batch.numbers}",
            "target": describe_shapes(target),
            "input values": sum_values(list(batch.tensors)),
            "target values": sum_values(target),
        }

    def _find_shared_weights(self, program: Program) -> SharedWeights:
        """Return the weights of a program that several ranks read. They are found once and then kept."""
        if id(program) not in self._shared_weights:
            self._shared_weights[id(program)] = program, SharedWeights(program, self.world)
        return self._shared_weights[id(program)][1]

    def _find_key(self, request: JobRequest) -> Any:
        """Return a key for the layouts of a job's messages: jobs with equal keys send messages of the same layouts."""
        batch = request.batch
        shapes = tuple((t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in batch.tensors)
        return (
            request.call, id(batch.program), tuple(batch.rows), shapes, batch.program.list_flags(),
            torch.is_grad_enabled(), is_autocast_on([self.world.device.type]),
        )  # fmt: skip

    def run(self, job: Job) -> None:
        """Run the actions that a job's schedule gives to this rank, in the calling thread. Raises the job's error."""
        me, device = self.world.me, self.world.device
        stream = self.streams[me]
        ready = mark_caller([device, *job.list_devices()])
        self._now = job, threading.get_ident()
        self.world.describe_job = lambda: self.get_status().describe()
        try:
            # Hooks of leaves expect the sum of a batch, so mute them. Run autograd in this thread, as in a worker.
            with mute(()), torch.autograd.set_multithreading_enabled(False):
                job.run(me, stream, ready)
        finally:
            self._now = None
            self.world.describe_job = lambda: ""
        make_caller_wait([device], job.marks)
        if (error := job.take_error()) is not None:
            try:
                raise error
            finally:
                # This frame is in the error's traceback, and must not refer to the error.
                del error

    def begin(self, handle: JobHandle) -> None:
        """Raise InputError: a rank runs one job at a time."""
        raise InputError(
            "generate() runs several batches at once, and ranks run one at a time: compile for the devices of one "
            "machine, fxsplit.compile(model, 2)"
        )

    def finish(self, handle: JobHandle, timeout_s: float | None = None) -> None:
        """Raise InputError: no job can have been begun, since `begin` always raises."""
        self.begin(handle)

    def give_up(self, handle: JobHandle) -> None:
        """Do nothing: no job was begun."""

    def has(self, thread: Any) -> bool:
        """Return whether `thread` is running a job of this rank."""
        now = self._now
        return now is not None and now[1] == thread.ident

    def get_status(self) -> Status:
        """Return this rank's present state. Call it from another thread."""
        now, me = self._now, self.world.me
        doing = None if now is None else now[0].describe_work(me, sys._current_frames().get(now[1]))
        return Status((doing or WorkerStatus(me, f"rank {me}"),))

    @property
    def cannot_be_waited_for(self) -> bool:
        """Whether the calling thread is inside a job, and so would wait for itself."""
        return self.has(threading.current_thread())

    def wait_until_idle(self) -> None:
        """Return at once: a rank runs jobs only inside calls, so no job runs now."""

    def check_free(self) -> None:
        """Raise ClosedError after close()."""
        if self._closed:
            raise ClosedError("the pipeline is closed: compile the model again")

    def close(self) -> None:
        """Close the pipeline. Process groups stay open, since other pipelines use them too."""
        self._closed = True
