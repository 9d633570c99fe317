"""Clock: how long a search may still take, in seconds and in steps of a kernel, which cannot look at the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

ANY_NUMBER = 2**62
"""Steps enough for anything."""


class OutOfTime(Exception):
    """The deadline has passed; the planner itself catches this and says what it knows by then."""


@dataclass
class Clock:
    """Runs kernels until `deadline`, in seconds of time.monotonic.

    `steps_per_s` is what they did so far; before the first has run it is a guess on the safe side.
    """

    deadline: float = inf
    steps_per_s: float = 1e6

    @classmethod
    def limited(cls, seconds: float) -> Clock:
        """Return a clock that starts now."""
        return cls(time.monotonic() + seconds)

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def check(self) -> None:
        """Raise OutOfTime when the deadline has passed."""
        if self.over:
            raise OutOfTime

    def run(self, kernel: Callable[[int], tuple[Any, Any, int]]) -> tuple[Any, Any]:
        """Return the two tables of a kernel that is given a number of steps and tells how many it took.

        One that needs more stops early, and runs again if there is time left. Raises OutOfTime.
        """
        while True:
            self.check()
            begin = time.monotonic()
            steps = 1 + int(min((self.deadline - begin) * self.steps_per_s, ANY_NUMBER))
            one, other, taken = kernel(steps)
            if taken <= steps:
                return one, other
            self.steps_per_s = taken / max(time.monotonic() - begin, 1e-6)
