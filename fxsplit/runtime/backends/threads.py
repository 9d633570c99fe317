"""Workers: one thread a device, which waits for jobs and ends with the pipeline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch

from fxsplit.errors import ClosedError
from fxsplit.runtime.job import Job
from fxsplit.runtime.streams import Stream, make_caller_wait, make_stream, mark_caller

GRACE_S = 1.5
"""How long an interrupted caller waits for workers to finish the action they are in."""

Task = Callable[[Stream], None]


class Workers:
    """One thread for each device. Holds no reference to a pipeline, so that a pipeline can end while they wait."""

    def __init__(self, devices: list[torch.device], intraop_threads: int) -> None:
        self._devices = devices
        self._tasks: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in devices]
        self._closed = False
        self._process = os.getpid()
        self._open = threading.RLock()  # close() may run in a garbage collection inside run()
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
        for _ in self._threads:
            up.get()
        torch.set_num_threads(before)  # a worker's own number is also what threads started later would get

    def has(self, thread: threading.Thread) -> bool:
        """Return whether `thread` is one of the workers."""
        return thread in self._threads

    def run(self, job: Job) -> None:
        """Run a job on all devices and return when it is done; raises the first error of any worker.

        Interrupted (Ctrl-C), it stops the workers after the action they are in, and waits at most GRACE_S for that.
        """
        finished: SimpleQueue[None] = SimpleQueue()
        ready = list(mark_caller(self._devices).values())
        left = 0
        try:
            if self._process != os.getpid():
                raise ClosedError(
                    "the pipeline's threads stayed in the process that forked: compile the model in this one"
                )
            with self._open:  # or close() could end a worker between two of the job's tasks
                if self._closed:
                    raise ClosedError("the pipeline is closed: compile the model again")
                for device, tasks in enumerate(self._tasks[: job.n_devices]):
                    tasks.put(_make_task(job, device, ready, finished))
                    left += 1
            while left:
                finished.get()
                left -= 1
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
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)


def _make_task(job: Job, device: int, ready: list[object], finished: SimpleQueue[None]) -> Task:
    """Return what one worker does for a job."""

    def task(stream: Stream) -> None:
        try:
            job.run(device, stream, ready)
        finally:
            finished.put(None)

    return task


def _serve(tasks: SimpleQueue[Task | None], device: torch.device, intraop_threads: int, up: SimpleQueue[None]) -> None:
    """Do tasks until None comes."""
    torch.get_num_threads()  # the next line holds in a thread only after this one
    torch.set_num_threads(intraop_threads)
    stream = make_stream(device)
    up.put(None)
    while True:
        task = tasks.get()
        if task is None:
            return
        task(stream)
        del task  # or the last job's tensors would live until the next one
