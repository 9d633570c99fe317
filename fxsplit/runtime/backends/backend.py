"""Interfaces of backends, which run jobs, and of sessions, which coordinate the processes that run one job together.

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
    """The coordination of one job over all processes of a pipeline.

    channels, seed: the channels and the random seed of the job (None: the job makes its own).

    The session owns what the processes agree on:

    - whether they run the same job, and with which seed
    - whether all have succeeded, and the results that all of them get
    - whether all of them add their gradients, or none does
    """

    channels: Channels | None
    seed: int | None

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run this process's part of the job until it is done. Raises its first error."""

    def finish(self, job: Job, compute_total: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Give every process the outputs, the gradients of inputs, and the loss, which `compute_total` returns.

        An error of one process is raised on every process. Returns the loss, or None without `compute_total`.
        """

    def add_to_gradients(self, job: Job) -> None:
        """Let a job add to existing `.grad` tensors in place. Call it before the job runs."""

    def commit(self, job: Job, record: CommitRecord) -> None:
        """Add the job's sums of gradients to the `.grad` of the weights of this process: on all processes, or on none.

        Afterwards every process knows which parameters have a gradient.
        """

    def take_sums(self, job: Job) -> Sums:
        """Return the job's sums of gradients, for a caller's backward(): autograd itself then adds them to `.grad`.

        After that backward(), every process knows which parameters have a gradient.
        """


class Backend(Protocol):
    """Runs the actions of jobs, in threads of this process or in the calling thread of each rank.

    The backend owns:

    - the threads, or the process groups
    - a stream for each device
    - the jobs that were begun and have not ended
    """

    streams: list[DeviceStream]

    def meet(self, request: JobRequest) -> AbstractContextManager[JobSession]:
        """Return a context that yields a session for one job. Ranks first check that all of them want the same job."""

    def begin(self, handle: JobHandle) -> None:
        """Begin a job, and return without waiting for its end."""

    def finish(self, handle: JobHandle, timeout_s: float | None = None) -> None:
        """Wait until a job that was begun has ended.

        Raises its first error, or StepTimeout after `timeout_s` seconds.
        """

    def give_up(self, handle: JobHandle) -> None:
        """Stop a job that was begun, unless it has ended already."""

    def has(self, thread: Any) -> bool:
        """Return whether a thread runs actions of this backend. In such a thread, a wait for a job would never end."""

    def get_status(self) -> Status:
        """Return the present state of the workers."""

    @property
    def cannot_be_waited_for(self) -> bool:
        """Whether waiting for jobs would never end or is not needed.

        A worker thread, for example, would wait for itself.
        """

    def wait_until_idle(self) -> None:
        """Wait until no job is running."""

    def check_free(self) -> None:
        """Raise BusyError if a job that was given up still runs, and ClosedError after `close`."""

    def close(self) -> None:
        """End the workers; no job can run afterwards."""
