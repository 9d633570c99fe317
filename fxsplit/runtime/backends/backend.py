"""Meetings: what the processes that run one pipeline do together around each job; a process by itself does nothing.

The engine meets before a job, runs it, and ends it. Ranks compare what they are about to do when they meet, and share
what the job has made when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fxsplit.runtime.job.channels import Channels
from fxsplit.runtime.job.handle import JobHandle
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.job.status import Status
from fxsplit.runtime.loss.loss import BatchLoss
from fxsplit.runtime.program import Batch
from fxsplit.runtime.stage.streams import DeviceStream
from fxsplit.schedule.schedule import Schedule
from fxsplit.torch_internals.autograd.sums import Sums


@dataclass(frozen=True, eq=False)
class JobRequest:
    """What processes meet for: "step", "forward" or "backward" of a batch, by a schedule.

    loss: that of a step. keep_outputs: whether a step returns its outputs.
    """

    call: str
    batch: Batch
    schedule: Schedule
    loss: BatchLoss | None = None
    keep_outputs: bool = False


class JobSession(Protocol):
    """One job of all processes of a pipeline. `channels` and `seed` are the job's; None for its own."""

    channels: Channels | None
    seed: int | None

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run this process's part of the job, and return when it is done; raises its first error."""

    def end(self, job: Job, compute_total: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Let every process have the outputs, the gradients of inputs and the loss, which `compute_total` returns.

        Raises on every process what one of them raised.
        """

    def add_to_gradients(self, job: Job) -> None:
        """Let a job add to each `.grad` that is there, before it runs."""

    def total(self, job: Job) -> Sums:
        """Return the sums of gradients of the weights that live in this process."""

    def agree_to_add(self, leaves: Collection[Tensor]) -> None:
        """Return once no process can fail any more before it adds its sums; `leaves` have no `.grad` of them yet.

        Raises on every process what one of them raised.
        """

    def share_gradients(self) -> None:
        """Let every process know which parameters have a gradient, once the sums have been added."""

    def share_gradients_after_backward(self) -> None:
        """Do so when the backward of the caller's loss, which runs now, is over."""


class LocalSession:
    """A session of one process. `run` runs a job with a limit of time."""

    channels: Channels | None = None
    seed: int | None = None

    def __init__(self, run: Callable[[Job, float | None], None]) -> None:
        self._run = run

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run the job, and return when it is done; raises its first error."""
        self._run(job, timeout_s)

    def end(self, job: Job, compute_total: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Return the loss, which `compute_total` returns."""
        return None if compute_total is None else compute_total()

    def add_to_gradients(self, job: Job) -> None:
        """Let a job add to each `.grad` that is there, before it runs."""
        job.add_to_gradients()

    def total(self, job: Job) -> Sums:
        """Return the sums of gradients of all weights."""
        return job.total()

    def agree_to_add(self, leaves: Collection[Tensor]) -> None:
        """Do nothing: there is nobody else."""

    def share_gradients(self) -> None:
        """Do nothing: all parameters are here."""

    def share_gradients_after_backward(self) -> None:
        """Do nothing: all parameters are here."""


class Backend(Protocol):
    """Who runs the actions of jobs: threads of this process, or the calling thread beside other processes."""

    streams: list[DeviceStream]

    def meet(self, request: JobRequest) -> AbstractContextManager[JobSession]:
        """Return a session for the length of a block, in which one job is run."""

    def begin(self, handle: JobHandle) -> None:
        """Begin a job, and do not wait for it."""

    def finish(self, handle: JobHandle, timeout_s: float | None = None) -> None:
        """Return when a job that was begun is done; raises its first error."""

    def give_up(self, handle: JobHandle) -> None:
        """Stop a job that was begun, if it is not over."""

    def has(self, thread: Any) -> bool:
        """Return whether a thread runs actions."""

    def get_status(self) -> Status:
        """Return what is being done now."""

    @property
    def cannot_be_waited_for(self) -> bool:
        """Whether a wait would have no end, or no sense, as in a thread that runs actions."""

    def wait_until_idle(self) -> None:
        """Return when nothing is under way."""

    def check_free(self) -> None:
        """Raise BusyError where a job that was given up is not over, ClosedError where no job can be run any more."""

    def close(self) -> None:
        """End; nothing can be run afterwards."""
