"""Interfaces of backends, which run jobs, and of sessions, which coordinate processes around each job.

    with backend.meet(request) as session:     ranks compare what they will run
        session.run(job)                       this process's part
        session.finish(job, compute_total)     share outputs, gradients of inputs and the loss, or an error
        session.commit(job, record)            no process can fail any more; then each adds its sums to .grad

In one process there is nothing to compare or share: see `LocalSession` in `threads.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fxsplit.runtime.job.channels import Channels
from fxsplit.runtime.job.job import Job, JobHandle
from fxsplit.runtime.job.status import Status
from fxsplit.runtime.loss.loss import BatchLoss
from fxsplit.runtime.program import Batch
from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.schedule.schedule import Schedule
from fxsplit.torch_internals.autograd.accumulate import CommitRecord
from fxsplit.torch_internals.autograd.sums import Sums


@dataclass(frozen=True, eq=False)
class JobRequest:
    """A request to run one job: "step", "forward" or "backward" of a batch, by a schedule.

    loss: the loss of a step. keep_outputs: whether a step returns its outputs.
    """

    call: str
    batch: Batch
    schedule: Schedule
    loss: BatchLoss | None = None
    keep_outputs: bool = False


class JobSession(Protocol):
    """One job of all processes of a pipeline. `channels` and `seed` are for the job (None: the job makes its own).

    The session owns what the processes agree on:

    - whether they run the same job, with which seed
    - whether all have succeeded, and the results that all get
    - whether all add their sums, or none does
    """

    channels: Channels | None
    seed: int | None

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run this process's part of the job until it is done. Raises its first error."""

    def finish(self, job: Job, compute_total: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Give every process the outputs, the gradients of inputs, and the loss, which `compute_total` returns.

        An error of one process is raised on every process.
        """

    def add_to_gradients(self, job: Job) -> None:
        """Let a job add to existing `.grad` tensors in place. Call it before the job runs."""

    def commit(self, job: Job, record: CommitRecord) -> None:
        """Add the job's sums to the `.grad` of the weights that live in this process: on all processes, or on none.

        Afterwards every process knows which parameters have a gradient.
        """

    def take_sums(self, job: Job) -> Sums:
        """Return the same sums for autograd to add, whose backward of the caller's loss runs.

        After that backward, every process knows which parameters have a gradient.
        """


class Backend(Protocol):
    """Runs the actions of jobs: threads of this process, or the calling thread of each rank.

    The backend owns:

    - the threads, or the process groups
    - a stream for each device
    - the jobs that were begun and are not over
    """

    streams: list[DeviceStream]

    def meet(self, request: JobRequest) -> AbstractContextManager[JobSession]:
        """Return a session for the block, which runs one job."""

    def begin(self, handle: JobHandle) -> None:
        """Begin a job, and do not wait for it."""

    def finish(self, handle: JobHandle, timeout_s: float | None = None) -> None:
        """Wait until a job that was begun is done. Raises its first error."""

    def give_up(self, handle: JobHandle) -> None:
        """Stop a job that was begun, unless it is over."""

    def has(self, thread: Any) -> bool:
        """Return whether a thread runs actions."""

    def get_status(self) -> Status:
        """Return the present state of the workers."""

    @property
    def cannot_be_waited_for(self) -> bool:
        """Whether a wait for jobs would never end or is not needed, for example in a worker thread."""

    def wait_until_idle(self) -> None:
        """Wait until no job is running."""

    def check_free(self) -> None:
        """Raise BusyError if a job that was given up still runs, and ClosedError if no job can run any more."""

    def close(self) -> None:
        """End the workers; no job can run afterwards."""
