"""Clock: the time left for a search, in seconds and in steps of a kernel.

Compiled code cannot read the time. A kernel gets a number of steps instead, counts them, and stops early when it has
used them up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

ANY_NUMBER = 2**62
"""Enough steps for any kernel; a 64-bit integer holds twice as many."""


class OutOfTime(Exception):
    """The deadline has passed. The planner catches this and returns the best result so far."""


@dataclass
class Work:
    """The work of a search: the runs of its kernels, each of which tests one threshold, and their steps."""

    tests: int = 0
    steps: int = 0


@dataclass
class SearchClock:
    """Runs kernels until `deadline`, in seconds of time.monotonic.

    `steps_per_s` is the speed of the last kernel, and a low guess before the first. `work` counts what has been done;
    clocks that are made from this one count there too.
    """

    deadline: float = inf
    steps_per_s: float = 1e6
    work: Work = field(default_factory=Work)

    @classmethod
    def limited(cls, seconds: float) -> SearchClock:
        """Return a clock that starts now and ends after `seconds`."""
        return cls(time.monotonic() + seconds)

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def halve(self) -> SearchClock:
        """Return a clock that ends after half of the remaining time."""
        now = time.monotonic()
        return replace(self, deadline=now + (self.deadline - now) / 2)

    def check(self) -> None:
        """Raise OutOfTime if the deadline has passed."""
        if self.over:
            raise OutOfTime

    def run(self, kernel: Callable[[int], tuple[Any, Any, int]]) -> tuple[Any, Any]:
        """Call `kernel` with a limit of steps and return its two tables.

        `kernel` returns two tables and the number of steps it took. If it stops at the limit and time is left, it runs
        again with a higher one. Raises OutOfTime.
        """
        while True:
            # A kernel cannot check the deadline itself.
            self.check()
            begin = time.monotonic()
            steps = 1 + int(min((self.deadline - begin) * self.steps_per_s, ANY_NUMBER))
            one, other, taken = kernel(steps)
            self.work.tests += 1
            self.work.steps += min(taken, steps)
            if taken <= steps:
                return one, other
            # The guess was too low: the kernel stopped early. Its steps show how fast it is.
            self.steps_per_s = taken / max(time.monotonic() - begin, 1e-6)
