"""ThreadBackend as threads of this process: one for each device, which waits for jobs and ends with the pipeline.

torch gives up Python's interpreter lock inside its operators, so the threads compute at the same time.
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

from fxsplit.errors import BusyError, ClosedError, StepTimeout
from fxsplit.runtime.backends.backend import JobRequest, LocalSession
from fxsplit.runtime.job.handle import GRACE_S, JobHandle
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.job.status import Status, WorkerStatus
from fxsplit.runtime.stage.streams import DeviceStream, make_caller_wait, make_stream, mark_caller
from fxsplit.system.interrupts import raise_lost_interrupt
from fxsplit.torch_internals.autograd.leaves import mute
from fxsplit.torch_internals.random.seeded_calls import lend_draws
from fxsplit.torch_internals.scopes.undo import call_all, restore_after, restores_all

LOOK_S = 5.0
"""How often a caller that waits looks whether the workers are still there."""
EXIT_S = 10.0
"""How long an interpreter that ends waits for workers: one that ran on while it is taken down would abort it."""

Task = Callable[[DeviceStream], None]
"""What one worker does for one job, on its stream."""
Tasks = SimpleQueue[Task | None]


class ThreadBackend:
    """One thread for each device. Holds no reference to a pipeline, so that a pipeline can end while they wait.

    `intraop_threads` is how many threads an operator may use inside of each worker. `names` are those of the devices.
    Each worker has its own of `streams`. Raises what keeps a worker from starting, as an accelerator whose memory is
    full.
    """

    @restores_all
    def __init__(self, devices: list[torch.device], intraop_threads: int, names: Sequence[str] = ()) -> None:
        if sys.is_finalizing():
            raise ClosedError("Python is about to end, and no thread can be started any more")
        self.streams = [make_stream(device) for device in devices]
        self._devices = devices
        self._names = names or [str(device) for device in devices]
        self._tasks: list[Tasks] = [SimpleQueue() for _ in devices]
        self._closed = self._started = False
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        # Those that may not be over, in the order in which they were begun. One that is over may be gone.
        self._handles: list[weakref.ref[JobHandle]] = []
        _note_running(self)
        up: SimpleQueue[BaseException | None] = SimpleQueue()
        # What a worker sets for itself is also what threads that start later would get.
        with (
            restore_after(partial(torch.set_num_threads, torch.get_num_threads())),
            restore_after(self._end_unless_started),
        ):
            for i, (tasks, stream) in enumerate(zip(self._tasks, self.streams, strict=True)):
                # Workers that are dropped, or never got ready, end too. This calls put(None, ...) in C: of an interrupt
                # in a finaliser written in Python nobody would hear.
                dropped = weakref.ref(self, partial(tasks.put, None))
                name, arguments = f"fxsplit-worker-{i}", (tasks, stream, intraop_threads, up, dropped)
                self._threads.append(threading.Thread(target=_serve, args=arguments, name=name, daemon=True))
                self._threads[-1].start()
            # All workers have set their number of threads when this loop ends.
            for _ in self._threads:
                if (error := up.get()) is not None:
                    raise error
            self._started = True

    def has(self, thread: threading.Thread) -> bool:
        """Return whether `thread` is one of the workers."""
        return thread in self._threads

    @contextmanager
    def meet(self, request: JobRequest) -> Iterator[LocalSession]:
        """Return a session of this process."""
        yield LocalSession(self.run)

    @property
    def cannot_be_waited_for(self) -> bool:
        """Whether a wait would have no end, or no sense: in a forked process, of closed workers, and in a worker."""
        return self._process != os.getpid() or self._closed or self.has(threading.current_thread())

    def run(self, job: Job, timeout_s: float | None = None) -> None:
        """Run a job on all devices and return when it is done. Raises what `begin` and `finish` raise.

        Interrupted (Ctrl-C), it stops the workers after the action they are in, and waits at most GRACE_S for that.
        """
        handle = JobHandle(job)
        with restore_after(handle.give_up):
            self.begin(handle)
            self.finish(handle, timeout_s)

    def begin(self, handle: JobHandle) -> None:
        """Give the workers a job, which they do after those that were begun before; do not wait for it.

        Raises BusyError where a worker is still in a job that was given up; ClosedError after close(), and in a process
        that was forked from the one with the threads.
        """
        job = handle.job
        ready = mark_caller([*self._devices, *job.list_devices()])
        tasks = [partial(_run_task, job, device, ready, handle) for device in range(len(job.marks))]
        hand_out = [partial(queue.put, task) for queue, task in zip(self._tasks, tasks, strict=False)]
        self.check_free()
        self._handles = [ref for ref in self._handles if (one := ref()) and not one.over.is_set()]
        self._handles.append(weakref.ref(handle))
        # All workers get their task, or none does, whenever an interrupt comes.
        call_all([partial(setattr, handle, "begun", True), *hand_out])
        # close() may have come in between. Some worker never sees its task then, and those that do would wait for it.
        if self._closed:
            handle.give_up(grace_s=0.0)
        self._check_open()

    def finish(self, handle: JobHandle, timeout_s: float | None = None) -> None:
        """Return when a job that was begun is done; raises the first error of any worker, StepTimeout after a time.

        Raises ClosedError for a job that another thread has given up.
        """
        job = handle.job
        with lend_draws(), restore_after(handle.give_up):
            if not self._wait(handle, math.inf if timeout_s is None else timeout_s):
                raise StepTimeout(
                    f"the step takes longer than timeout_s={timeout_s:g}:\n{self.get_status().describe()}\n"
                    "No gradient has changed. The pipeline can be used again when these actions are over"
                )
        # Also after a failure: the caller may write to weights, which kernels that are queued still read.
        make_caller_wait(self._devices, job.marks)
        if handle.given_up:
            raise ClosedError("another thread has stopped what was under way")
        if (error := job.take_error()) is not None:
            try:
                raise error
            finally:
                # This frame is in the error's traceback, and must not refer to the error.
                del error

    def give_up(self, handle: JobHandle) -> None:
        """Stop a job that was begun, if it is not over, and wait a moment for its workers."""
        handle.give_up()
        # Kernels that are queued still read what the caller may free then.
        if handle.over.is_set():
            make_caller_wait(self._devices, handle.job.marks)

    def wait_until_idle(self) -> None:
        """Return when all jobs that were begun are over, but for those that were given up.

        Where `cannot_be_waited_for` says so, it returns at once.
        """
        if self.cannot_be_waited_for:
            return
        with lend_draws():
            for handle in [one for ref in self._handles if (one := ref()) and one.begun and not one.given_up]:
                self._wait(handle, math.inf)
        # Of what is over here, kernels may still be queued.
        make_caller_wait(self._devices, [stream.mark() for stream in self.streams])

    def _wait(self, handle: JobHandle, timeout_s: float) -> bool:
        """Wait until a job is over, and return whether it is; raises ClosedError where a worker that is at it ended."""
        deadline = time.monotonic() + timeout_s
        while (rest := deadline - time.monotonic()) > 0:
            raise_lost_interrupt()
            if handle.over.wait(min(rest, LOOK_S)):
                return True
            if not all(self._threads[device].is_alive() for device in list(handle.left)):
                raise ClosedError("a worker has ended in the middle of its work: close the pipeline, and compile again")
        return False

    def get_status(self) -> Status:
        """Return what each worker does now."""
        frames = sys._current_frames()
        handles = [handle for ref in self._handles if (handle := ref()) and handle.begun]
        found = []
        for i, (thread, name) in enumerate(zip(self._threads, self._names, strict=True)):
            handle = next((handle for handle in handles if i in handle.left), None)
            doing = None if handle is None else handle.job.describe_work(i, frames.get(thread.ident or 0))
            found.append(doing or WorkerStatus(i, name, operation="idle" if thread.is_alive() else "ended"))
        return Status(tuple(found))

    def close(self) -> None:
        """End the threads; safe to call twice, and from a worker itself."""
        self._closed = True
        _end(self._tasks)
        # A worker may drop the last reference to the pipeline, and a thread cannot wait for itself.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def end_at_exit(self) -> None:
        """End the threads for good: Python is about to end, and would be aborted by a thread that runs on."""
        self._closed = True
        _end(self._tasks)
        for ref in self._handles:
            if (handle := ref()) is not None:
                handle.job.stop()
        deadline = time.monotonic() + EXIT_S
        for thread in self._threads:
            thread.join(timeout=0.2)
            # It is inside a node, and may be for long: what is left of it no longer matters to anybody.
            while thread.is_alive() and time.monotonic() < deadline:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
                thread.join(timeout=0.1)

    def _check_open(self) -> None:
        """Raise ClosedError where the threads have been ended, or are those of another process."""
        if self._process != os.getpid():
            raise ClosedError("the pipeline's threads stayed in the process that forked: compile the model in this one")
        if self._closed:
            raise ClosedError("the pipeline is closed: compile the model again")

    def check_free(self) -> None:
        """Raise BusyError where a worker is still in a job that was given up, after a moment; ClosedError if closed."""
        self._check_open()
        given_up = [handle for ref in self._handles if (handle := ref()) and handle.begun and handle.given_up]
        if any(not handle.over.wait(GRACE_S) for handle in given_up):
            raise BusyError(
                f"a call that was interrupted is not over yet:\n{self.get_status().describe()}\n"
                "Call the pipeline again when that is done, or close it and compile the model again"
            )

    def _end_unless_started(self) -> None:
        """End the threads where an interrupt came before all were ready."""
        if not self._started:
            self._closed = True
            _end(self._tasks)


def _run_task(job: Job, device: int, ready: list[object], handle: JobHandle, stream: DeviceStream) -> None:
    """Do one worker's part of a job, and say when it is over. `ready` are tokens of the caller's work."""
    # Twice, as an exception may come in the middle of the first, and the caller would wait for ever.
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
    """Do tasks on a stream until None comes. `up` is told that the worker is ready, or why it cannot be.

    `dropped` puts None when nobody can give tasks. It does so for as long as it is held here.
    """
    try:
        # torch sets up a thread's number in its first call, which would undo the second line.
        torch.get_num_threads()
        torch.set_num_threads(intraop_threads)
    # The caller waits for an answer, and raises what it gets.
    except BaseException as error:
        up.put(error)
        return
    up.put(None)
    # All backwards of a worker are of microbatches, and gradient hooks expect the sum of a batch. The worker computes
    # them itself: autograd has one thread for each accelerator, in which the caller's own backward may be waiting for
    # the workers.
    with mute(()), torch.autograd.set_multithreading_enabled(False):
        while (task := tasks.get()) is not None:
            task(stream)
            # Otherwise the last job's tensors would live until the next one.
            del task


def _end(queues: Sequence[Tasks]) -> None:
    """Tell the workers behind these queues to end."""
    for tasks in queues:
        tasks.put(None)


_running: list[weakref.ref[ThreadBackend]] = []


def _note_running(workers: ThreadBackend) -> None:
    """Keep in mind that these workers may run when Python ends."""
    for gone in [ref for ref in _running if ref() is None]:
        # Another thread may have removed it.
        with suppress(ValueError):
            _running.remove(gone)
    _running.append(weakref.ref(workers))


@atexit.register
def _end_all() -> None:
    """End all workers when Python ends."""
    for ref in _running:
        if (workers := ref()) is not None:
            workers.end_at_exit()
