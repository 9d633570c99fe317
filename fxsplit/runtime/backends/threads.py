"""Workers as threads of this process: one for each device, which waits for jobs and ends with the pipeline.

torch gives up Python's interpreter lock inside its operators, so the threads compute at the same time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import torch

from fxsplit.errors import ClosedError
from fxsplit.runtime.job import Job
from fxsplit.runtime.streams import Stream, make_caller_wait, make_stream, mark_caller

GRACE_S = 1.5
"""How long an interrupted caller waits for workers to finish the action they are in."""

Task = Callable[[Stream], None]
"""What one worker does for one job, on its stream."""


class Workers:
    """One thread for each device. Holds no reference to a pipeline, so that a pipeline can end while they wait.

    `intraop_threads` is how many threads an operator may use inside of each worker.
    """

    def __init__(self, devices: list[torch.device], intraop_threads: int) -> None:
        self._devices = devices
        self._tasks: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in devices]
        self._closed = False
        self._process = os.getpid()
        # Reentrant, since close() may run in a garbage collection inside run().
        self._open = threading.RLock()
        before = torch.get_num_threads()
        up: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_serve, args=(tasks, device, intraop_threads, up), name=f"fxsplit-worker-{i}", daemon=True
            )
            for i, (tasks, device) in enumerate(zip(self._tasks, devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        # All workers have set their number of threads when this loop ends.
        for _ in self._threads:
            up.get()
        # What a worker sets for itself is also what threads that start later would get.
        torch.set_num_threads(before)

    def has(self, thread: threading.Thread) -> bool:
        """Return whether `thread` is one of the workers."""
        return thread in self._threads

    def run(self, job: Job) -> None:
        """Run a job on all devices and return when it is done. Raises the first error of any worker.

        Interrupted (Ctrl-C), it stops the workers after the action they are in, and waits at most GRACE_S for that.
        Raises ClosedError after close(), and in a process that was forked from the one with the threads.
        """
        finished: SimpleQueue[None] = SimpleQueue()
        ready = mark_caller(self._devices)
        left = 0
        try:
            if self._process != os.getpid():
                raise ClosedError(
                    "the pipeline's threads stayed in the process that forked: compile the model in this one"
                )
            # Otherwise close() could end a worker between two of the job's tasks.
            with self._open:
                if self._closed:
                    raise ClosedError("the pipeline is closed: compile the model again")
                for device, tasks in enumerate(self._tasks[: len(job.marks)]):
                    tasks.put(partial(_run_task, job, device, ready, finished))
                    left += 1
            while left:
                finished.get()
                left -= 1
        # Ctrl-C raises KeyboardInterrupt in the caller, which is no Exception.
        except BaseException as interrupt:
            job.fail(interrupt)
            deadline = time.monotonic() + GRACE_S
            while left and (rest := deadline - time.monotonic()) > 0:
                try:
                    finished.get(timeout=rest)
                except Empty:
                    break
                left -= 1
            raise
        if job.error is not None:
            raise job.error
        make_caller_wait(list(zip(self._devices, job.marks, strict=False)))

    def close(self) -> None:
        """End the threads; safe to call twice, and from a worker itself."""
        with self._open:
            if self._closed:
                return
            self._closed = True
            for tasks in self._tasks:
                tasks.put(None)
        # A worker may drop the last reference to the pipeline, and a thread cannot wait for itself.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)


def _run_task(job: Job, device: int, ready: list[object], finished: SimpleQueue[None], stream: Stream) -> None:
    """Do one worker's part of a job, then tell `finished`. `ready` are tokens of the caller's work."""
    try:
        job.run(device, stream, ready)
    finally:
        finished.put(None)


def _serve(tasks: SimpleQueue[Task | None], device: torch.device, intraop_threads: int, up: SimpleQueue[None]) -> None:
    """Do tasks until None comes. `up` is told when the worker is ready."""
    # torch sets up a thread's number in its first call, which would undo the second line.
    torch.get_num_threads()
    torch.set_num_threads(intraop_threads)
    stream = make_stream(device)
    up.put(None)
    while (task := tasks.get()) is not None:
        task(stream)
        # Otherwise the last job's tensors would live until the next one.
        del task
