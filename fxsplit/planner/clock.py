"""Clock: how long a search may still take, in seconds and in steps of a kernel.

Compiled code cannot look at the time. So a kernel is given a number of steps, counts them, and stops early when it has
used them up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

ANY_NUMBER = 2**62
"""Enough steps for any kernel; a 64-bit integer holds twice as many."""


class OutOfTime(Exception):
    """The deadline has passed. The planner catches this and returns what it knows by then."""


@dataclass
class Clock:
    """Runs kernels until `deadline`, in seconds of time.monotonic.

    `steps_per_s` is how fast the last kernel ran. Before the first kernel has run it is a low guess.
    """

    deadline: float = inf
    steps_per_s: float = 1e6

    @classmethod
    def limited(cls, seconds: float) -> Clock:
        """Return a clock that starts now and ends after so many seconds."""
        return cls(time.monotonic() + seconds)

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def halve(self) -> Clock:
        """Return a clock that ends after half of the time that is left."""
        now = time.monotonic()
        return replace(self, deadline=now + (self.deadline - now) / 2)

    def check(self) -> None:
        """Raise OutOfTime when the deadline has passed."""
        if self.over:
            raise OutOfTime

    def run(self, kernel: Callable[[int], tuple[Any, Any, int]]) -> tuple[Any, Any]:
        """Return the two tables of a kernel that is given a number of steps and tells how many it took.

        A kernel that needs more steps stops early, and runs again if there is time left. Raises OutOfTime.
        """
        while True:
            # Ask before each run: a kernel itself cannot.
            self.check()
            begin = time.monotonic()
            steps = 1 + int(min((self.deadline - begin) * self.steps_per_s, ANY_NUMBER))
            one, other, taken = kernel(steps)
            if taken <= steps:
                return one, other
            # The guess was too low: the kernel stopped with time left. What it did tells how fast it is.
            self.steps_per_s = taken / max(time.monotonic() - begin, 1e-6)
