"""Phases of a long program, printed as they happen: a name when a phase begins, and its seconds when it ends.

    loading torch                                3.1 s
    trace and check                              8.0 s
    ...
    in all                                      41.2 s

A phase ends where the next one begins, so the seconds add up to the whole time.
"""

from __future__ import annotations

import time

WIDTH = 50
"""Characters before the seconds of a phase."""


class Phases:
    """Prints phases to standard output."""

    def __init__(self) -> None:
        self._start = self._begin = time.perf_counter()
        self._name = ""

    def begin(self, name: str) -> None:
        """Begin a phase, and end the one before. A phase that runs already goes on."""
        if name == self._name:
            return
        self._end(time.perf_counter())
        self._name = name
        print(f"{name:{WIDTH}}", end="", flush=True)

    def finish(self) -> None:
        """End the last phase, and print the sum."""
        now = time.perf_counter()
        self._end(now)
        print(f"{'in all':{WIDTH}}{now - self._start:6.1f} s", flush=True)

    def note(self, text: str) -> None:
        """Print a text below the phase that runs, which is then over; the time until the next one counts for that."""
        self._end(time.perf_counter())
        print(text, flush=True)

    def _end(self, now: float) -> None:
        if self._name:
            print(f"{now - self._begin:6.1f} s", flush=True)
            self._begin = now
        self._name = ""
