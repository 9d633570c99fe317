"""The bars that show the progress of long work on a terminal; see `fxsplit.ir.progress` for the work's side."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from fxsplit.ir.progress import listen, phase

if TYPE_CHECKING:
    from rich.progress import TaskID

PATIENCE_S = 1.0
"""Work that takes fewer seconds shows nothing."""


@contextmanager
def show_progress() -> Iterator[None]:
    """Show on standard error what work inside the block takes over a second, and how far it is, on terminals alone."""
    # A program without a console, such as pythonw, has no standard error at all.
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    bars = _Bars(sys.stderr)
    try:
        with listen(bars.hear):
            yield
    finally:
        bars.stop()


@contextmanager
def show_phase(what: str) -> Iterator[None]:
    """Show on standard error that the block takes over a second, on terminals alone."""
    with show_progress(), phase(what):
        yield


class _Bars:
    """One line for each phase that is going on, and a bar for work whose items are counted."""

    def __init__(self, stream: TextIO) -> None:
        # rich takes a tenth of a second to load, which programs without a terminal need not wait for.
        from rich.console import Console
        from rich.progress import Progress

        # The stream of now, and no other one in its place: phases redirect standard error, to which others print.
        self._progress = Progress(
            console=Console(file=stream), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._phases: dict[str, threading.Timer] = {}

    def hear(self, what: str, done: int, total: int) -> None:
        """Take note of progress, from whichever thread."""
        if done == 0:
            self._begin_phase(what)
        elif what in self._phases:
            self._end_phase(what)
        # The bar starts late and once: work that follows fast would make it flicker.
        elif time.monotonic() - self._begin >= PATIENCE_S:
            with self._lock:
                if what not in self._tasks:
                    self._tasks[what] = self._add(what, total)
                self._progress.update(self._tasks[what], completed=done)

    def stop(self) -> None:
        """Show nothing any more."""
        for what in list(self._phases):
            self._end_phase(what)
        self._progress.stop()

    def _begin_phase(self, what: str) -> None:
        """Show a phase as soon as it has taken long enough: nothing tells of it until it ends."""
        timer = threading.Timer(PATIENCE_S, self._show_phase, [what])
        timer.daemon = True
        self._phases[what] = timer
        timer.start()

    def _show_phase(self, what: str) -> None:
        """Show a phase that is going on, without an end in sight."""
        with self._lock:
            if what in self._phases:
                self._tasks[what] = self._add(what, None)

    def _end_phase(self, what: str) -> None:
        """Show a phase no longer."""
        with self._lock:
            self._phases.pop(what).cancel()
            task = self._tasks.pop(what, None)
            if task is not None:
                self._progress.remove_task(task)

    def _add(self, what: str, total: int | None) -> TaskID:
        """Return a new line."""
        self._progress.start()  # does nothing for bars that are shown already
        return self._progress.add_task(what, total=total)
