"""A backend of threads in this process, one thread for each device.

The threads wait for jobs, and end with the pipeline.
torch releases Python's interpreter lock inside its operators, so the threads compute at the same time.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from fxsplit.errors import BusyError, ClosedError, StepTimeout
from fxsplit.runtime.backends.backend import JobRequest
from fxsplit.runtime.job.channels import Channels
from fxsplit.runtime.job.job import GRACE_S, Job, JobHandle
from fxsplit.runtime.job.status import Status, WorkerStatus
from fxsplit.runtime.stage.streams import DeviceStream, make_caller_wait, make_stream, mark_caller
from fxsplit.system.interrupts import raise_lost_interrupt
from fxsplit.torch_internals.autograd.accumulate import CommitRecord, accumulate
from fxsplit.torch_internals.autograd.leaves import mute
from fxsplit.torch_internals.autograd.sums import Sums
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.undo import call_all, restore_after, restores_all

LOOK_S = 5.0
"""How often, in seconds, a waiting caller checks that the workers are alive."""
EXIT_S = 10.0
"""How long, in seconds, Python waits for workers when it exits. A thread that still runs would abort the exit."""

Task = Callable[[DeviceStream], None]
"""One worker's part of one job, on its stream."""
Tasks = SimpleQueue[Task | None]


class ThreadBackend:
    """Runs jobs with one thread for each device.

    It holds no reference to a pipeline, so a pipeline can be freed while the threads wait for jobs.
    intraop_threads: how many threads an operator may use inside each worker.
    names: the names of the devices.
    streams: one stream for each worker.
    Raises the error of a worker that cannot start, for example because its accelerator's memory is full.
    """

    @restores_all
    def __init__(self, devices: list[torch.device], intraop_threads: int, names: Sequence[str] = ()) -> None:
        if sys.is_finalizing():
            raise ClosedError("Python is exiting, so no worker can start: call the pipeline before the program ends")
        self.streams = [make_stream(device) for device in devices]
        self._devices = devices
        self._names = names or [str(device) for device in devices]
        self._tasks: list[Tasks] = [SimpleQueue() for _ in devices]
        self._closed = self._started = False
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        # Jobs that may not be over, in the order in which they were begun. A job that is over may be freed.
        self._handles: list[weakref.ref[JobHandle]] = []
        _note_running(self)
        up: SimpleQueue[BaseException | None] = SimpleQueue()
        # The number of threads that a worker sets is also the default of threads that start later: restore it.
        with (
            restore_after(partial(torch.set_num_threads, torch.get_num_threads())),
            restore_after(self._end_unless_started),
        ):
            for i, (tasks, stream) in enumerate(zip(self._tasks, self.streams, strict=True)):
                # This also ends workers when the backend is dropped or did not start. The partial calls put(None, ...)
                # in C: an interrupt inside a finaliser written in Python would be lost.
                dropped = weakref.ref(self, partial(tasks.put, None))
                name, arguments = f"fxsplit-worker-{i}", (tasks, stream, intraop_threads, up, dropped)
                self._threads.append(threading.Thread(target=_serve, args=arguments, name=name, daemon=True))
                self._threads[-1].start()
            # Each worker puts one item into `up` after it has set its number of threads.
            for _ in self._threads:
                if (error := up.get()) is not None:
                    raise error
            self._started = True

    def has(self, thread: threading.Thread) -> bool:
        """Return whether `thread` is one of the workers."""
        return thread in self._threads

    @contextmanager
    def meet(self, request: JobRequest) -> Iterator[LocalSession]:
        """Yield a session for a job that runs only in this process."""
        yield LocalSession(self.run)

    @property
    def cannot_be_waited_for(self) -> bool:
        """Whether a wait would never end or is not needed: in a forked process, after close(), or in a worker."""
        return self._process != os.getpid() or self._closed or self.has(threading.current_thread())

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run a job on all devices until it is done. Raises what `begin` and `finish` raise.

        On Ctrl-C it stops the workers after their present actions, and waits at most GRACE_S seconds for them.
        """
        handle = JobHandle(job)
        with restore_after(handle.give_up):
            self.begin(handle)
            self.finish(handle, timeout_s)

    def begin(self, handle: JobHandle) -> None:
        """Queue a job for the workers, which run jobs in order, and return without waiting for the job.

        Raises BusyError if a worker still runs a job that was given up. Raises ClosedError after close(), or in a
        forked process, since a fork has no workers.
        """
        job = handle.job
        ready = mark_caller([*self._devices, *job.list_devices()])
        tasks = [partial(_run_task, job, device, ready, handle) for device in range(len(job.marks))]
        hand_out = [partial(queue.put, task) for queue, task in zip(self._tasks, tasks, strict=False)]
        self.check_free()
        self._handles = [ref for ref in self._handles if (one := ref()) and not one.over.is_set()]
        self._handles.append(weakref.ref(handle))
        # Even if an interrupt comes, all workers get their task or none does.
        call_all([partial(setattr, handle, "begun", True), *hand_out])
        # close() may have come in between. Then some workers never see their task, and the rest would wait for them.
        if self._closed:
            handle.give_up(grace_s=0.0)
        self._check_open()

    def finish(self, handle: JobHandle, timeout_s: float | None = None) -> None:
        """Wait until a job that was begun is done. Raises the first error of any worker.

        Raises StepTimeout after `timeout_s` seconds, and ClosedError if another thread has given up the job.
        """
        job = handle.job
        with lend_draws(), restore_after(handle.give_up):
            if not self._wait(handle, math.inf if timeout_s is None else timeout_s):
                raise StepTimeout(
                    f"the step takes longer than timeout_s={timeout_s:g}:\n{self.get_status().describe()}\n"
                    "No gradient has changed. The pipeline can be used again when these actions are over"
                )
        # Also after a failure: the caller may write to weights that queued kernels still read.
        make_caller_wait(self._devices, job.marks)
        if handle.given_up:
            raise ClosedError("another thread has stopped this job: call the pipeline again")
        if (error := job.take_error()) is not None:
            try:
                raise error
            finally:
                # This frame is in the error's traceback, and must not refer to the error.
                del error

    def give_up(self, handle: JobHandle) -> None:
        """Stop a job that was begun, unless it is over, and wait briefly for its workers."""
        handle.give_up()
        # Queued kernels may still read memory that the caller is about to free.
        if handle.over.is_set():
            make_caller_wait(self._devices, handle.job.marks)

    def wait_until_idle(self) -> None:
        """Wait until all jobs that were begun have ended, except jobs that were given up.

        Returns at once if `cannot_be_waited_for`.
        """
        if self.cannot_be_waited_for:
            return
        with lend_draws():
            for handle in [one for ref in self._handles if (one := ref()) and one.begun and not one.given_up]:
                self._wait(handle, math.inf)
        # Kernels of finished jobs may still be queued.
        make_caller_wait(self._devices, [stream.mark() for stream in self.streams])

    def _wait(self, handle: JobHandle, timeout_s: float) -> bool:
        """Wait for a job at most `timeout_s` seconds, and return whether the job has ended.

        Raises ClosedError if one of its workers has died.
        """
        deadline = time.monotonic() + timeout_s
        while (rest := deadline - time.monotonic()) > 0:
            raise_lost_interrupt()
            if handle.over.wait(min(rest, LOOK_S)):
                return True
            if not all(self._threads[device].is_alive() for device in list(handle.left)):
                raise ClosedError("a worker has ended in the middle of its work: close the pipeline, and compile again")
        return False

    def get_status(self) -> Status:
        """Return each worker's present state."""
        frames = sys._current_frames()
        handles = [handle for ref in self._handles if (handle := ref()) and handle.begun]
        found = []
        for i, (thread, name) in enumerate(zip(self._threads, self._names, strict=True)):
            handle = next((handle for handle in handles if i in handle.left), None)
            doing = None if handle is None else handle.job.describe_work(i, frames.get(thread.ident or 0))
            found.append(doing or WorkerStatus(i, name, operation="idle" if thread.is_alive() else "ended"))
        return Status(tuple(found))

    def close(self) -> None:
        """End the threads. This may be called twice, and a worker itself may call it."""
        self._closed = True
        _end(self._tasks)
        # A worker may drop the last reference to the pipeline, and a thread cannot wait for itself.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def end_at_exit(self) -> None:
        """End the threads, even in the middle of a job: a thread that still runs would abort Python's exit."""
        self._closed = True
        _end(self._tasks)
        for ref in self._handles:
            if (handle := ref()) is not None:
                handle.job.stop()
        deadline = time.monotonic() + EXIT_S
        for thread in self._threads:
            thread.join(timeout=0.2)
            # The thread is inside an operator of the model, perhaps for long. Raise SystemExit in the thread.
            while thread.is_alive() and time.monotonic() < deadline:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
                thread.join(timeout=0.1)

    def _check_open(self) -> None:
        """Raise ClosedError if the threads have been ended, or belong to another process."""
        if self._process != os.getpid():
            raise ClosedError("the pipeline's threads stayed in the process that forked: compile the model in this one")
        if self._closed:
            raise ClosedError("the pipeline is closed: compile the model again")

    def check_free(self) -> None:
        """Raise ClosedError after close(), and BusyError if a job that was given up does not end.

        Waits at most GRACE_S seconds for such a job.
        """
        self._check_open()
        given_up = [handle for ref in self._handles if (handle := ref()) and handle.begun and handle.given_up]
        if any(not handle.over.wait(GRACE_S) for handle in given_up):
            raise BusyError(
                f"a call that was interrupted is not over yet:\n{self.get_status().describe()}\n"
                "Call the pipeline again when that is done, or close it and compile the model again"
            )

    def _end_unless_started(self) -> None:
        """End the threads if an interrupt came before all were ready."""
        if not self._started:
            self._closed = True
            _end(self._tasks)


class LocalSession:
    """A session for a job that runs only in this process.

    run: runs a job with a time limit in seconds (None: no limit).
    """

    channels: Channels | None = None
    seed: int | None = None

    def __init__(self, run: Callable[[Job, float | None], None]) -> None:
        self._run = run

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run the job until it is done. Raises its first error."""
        self._run(job, timeout_s)

    def finish(self, job: Job, compute_total: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Return the loss, computed by `compute_total` (None: the job has no loss).

        There is no other process to share it with.
        """
        return None if compute_total is None else compute_total()

    def add_to_gradients(self, job: Job) -> None:
        """Let workers add to existing `.grad` tensors in place while the job runs."""
        job.add_to_gradients()

    def commit(self, job: Job, record: CommitRecord) -> None:
        """Add the job's sums of gradients to the `.grad` of all weights: to all, or after an interrupt to none."""
        sums = job.total()
        raise_lost_interrupt()
        accumulate(sums, record)

    def take_sums(self, job: Job) -> Sums:
        """Return the sums of gradients of all weights."""
        return job.total()


def _run_task(job: Job, device: int, ready: list[object], handle: JobHandle, stream: DeviceStream) -> None:
    """Run one worker's part of a job, and note in `handle` that the part has ended.

    ready: tokens of the work that the caller has queued, which the worker's stream must wait for.
    """
    # Call `end` twice: an exception such as Ctrl-C may interrupt the first call, and the caller would wait forever.
    try:
        try:
            job.run(device, stream, ready)
        except BaseException as error:
            job.fail(error)
        finally:
            handle.end(device)
    finally:
        handle.end(device)


def _serve(
    tasks: Tasks,
    stream: DeviceStream,
    intraop_threads: int,
    up: SimpleQueue[BaseException | None],
    dropped: weakref.ref[ThreadBackend],
) -> None:
    """Run tasks on a stream until the task None comes. This is the main function of a worker thread.

    up: gets None when the worker is ready, or the error if the worker cannot start.
    dropped: a weak reference that puts None into `tasks` when the backend is freed. It works only while an object holds
        the reference, so this function does.
    """
    try:
        # The first call in a thread sets up torch's number of threads, and would undo the second line.
        torch.get_num_threads()
        torch.set_num_threads(intraop_threads)
    # The caller waits for an answer, and raises the error that it gets.
    except BaseException as error:
        up.put(error)
        return
    up.put(None)
    # A worker's backwards are of microbatches, while the user's gradient hooks expect the sum of a batch, so hooks are
    # muted. The worker runs autograd in its own thread: autograd's thread for an accelerator may be busy with the
    # caller's own backward, which waits for the workers.
    with mute(()), torch.autograd.set_multithreading_enabled(False):
        while (task := tasks.get()) is not None:
            task(stream)
            # Otherwise the last job's tensors would live until the next one.
            del task


def _end(queues: Sequence[Tasks]) -> None:
    """Make the workers of these queues end."""
    for tasks in queues:
        tasks.put(None)


_running: list[weakref.ref[ThreadBackend]] = []


def _note_running(workers: ThreadBackend) -> None:
    """Note that these workers may still run when Python exits."""
    for gone in [ref for ref in _running if ref() is None]:
        # Another thread may have removed it.
        with suppress(ValueError):
            _running.remove(gone)
    _running.append(weakref.ref(workers))


@atexit.register
def _end_all() -> None:
    """End all workers when Python exits."""
    for ref in _running:
        if (workers := ref()) is not None:
            workers.end_at_exit()
