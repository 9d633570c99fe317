"""The progress of a job that other threads run."""

from __future__ import annotations

import threading

from fxsplit.runtime.job.job import Job

GRACE_S = 1.5
"""How long, in seconds, an interrupted caller waits for workers to finish their present actions."""


class JobHandle:
    """The progress of a job: whether it was begun, which devices still run it, and whether it was given up."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = self.given_up = False
        self.left = set(range(len(job.marks)))
        self.over = threading.Event()

    def give_up(self, grace_s: float = GRACE_S) -> None:
        """Stop the job unless it is over, and wait briefly for its workers."""
        if not self.over.is_set():
            self.given_up = True
            self.job.stop()
            if self.begun:
                self.over.wait(grace_s)

    def end(self, device: int) -> None:
        """Note that a device's worker has ended its part. A second call changes nothing."""
        self.left.discard(device)
        if not self.left:
            self.over.set()
