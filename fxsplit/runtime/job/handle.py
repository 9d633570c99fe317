"""JobHandle: how far a job has come that other threads run."""

from __future__ import annotations

import threading

from fxsplit.runtime.job.job import Job

GRACE_S = 1.5
"""How long an interrupted caller waits for workers to finish the action they are in."""


class JobHandle:
    """How far a job has come: whether it was begun, who is still at it, and whether nobody waits for it any more."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = self.given_up = False
        self.left = set(range(len(job.marks)))
        self.over = threading.Event()

    def give_up(self, grace_s: float = GRACE_S) -> None:
        """Stop the job if it is not over, and wait a moment for workers that are at it."""
        if not self.over.is_set():
            self.given_up = True
            self.job.stop()
            if self.begun:
                self.over.wait(grace_s)

    def end(self, device: int) -> None:
        """Note that a device's worker has ended its part; to do so again changes nothing."""
        self.left.discard(device)
        if not self.left:
            self.over.set()
