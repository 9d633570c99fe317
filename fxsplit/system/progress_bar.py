"""Progress bars for long work, on a terminal or in a notebook; see `fxsplit.system.progress`."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from fxsplit.system.progress import has_listener, listen, phase

if TYPE_CHECKING:
    from rich.progress import TaskID

PATIENCE_S = 1.0
"""Work that takes less than this many seconds shows nothing."""


@contextmanager
def show_progress() -> Iterator[None]:
    """Show the progress of work in the block, if the work takes longer than PATIENCE_S.

    Bars appear on standard error if that is a terminal, or below a notebook's cell. A notebook without ipywidgets gets
    a line of text for each phase. Elsewhere nothing is shown. An inner block shares the bars of the outer block.
    """
    shown: _Display
    if has_listener():
        yield
        return
    # A program without a console, such as pythonw, has no standard error.
    if is_notebook():
        shown = _Bars(None) if find_spec("ipywidgets") else _Lines(sys.stderr)
    elif sys.stderr is not None and sys.stderr.isatty():
        shown = _Bars(sys.stderr)
    else:
        yield
        return
    try:
        with listen(shown.hear):
            yield
    finally:
        shown.stop()


@contextmanager
def show_phase(what: str) -> Iterator[None]:
    """Show the block as a phase called `what`, if it takes longer than PATIENCE_S (see show_progress)."""
    with show_progress(), phase(what):
        yield


def is_notebook() -> bool:
    """Return whether this program runs in a notebook."""
    # Do not import IPython: in a notebook it is imported already.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # A notebook's shell has a kernel; IPython in a terminal has none.
    return getattr(shell, "kernel", None) is not None


class _Display(ABC):
    """Receives progress from any thread, and shows work that takes long."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._phases: dict[str, threading.Timer] = {}

    def hear(self, what: str, done: int, total: int) -> None:
        """Receive a report of progress, from any thread; see Listener for the arguments."""
        if done == 0:
            self._begin_phase(what)
        elif what in self._phases:
            self._end_phase(what)
        # Show counted work late and only once, since a quick succession would flicker.
        elif time.monotonic() - self._begin >= PATIENCE_S:
            with self._lock:
                self._show_count(what, done, total)

    def stop(self) -> None:
        """Remove all phases from the display."""
        for what in list(self._phases):
            self._end_phase(what)

    def _begin_phase(self, what: str) -> None:
        """Show a phase after PATIENCE_S, since it reports nothing until it ends."""
        timer = threading.Timer(PATIENCE_S, self._show_late, [what])
        timer.daemon = True
        self._phases[what] = timer
        timer.start()

    def _show_late(self, what: str) -> None:
        """Show a phase if it is still running."""
        with self._lock:
            if what in self._phases:
                self._show_phase(what)

    def _end_phase(self, what: str) -> None:
        with self._lock:
            self._phases.pop(what).cancel()
            self._hide_phase(what)

    @abstractmethod
    def _show_phase(self, what: str) -> None:
        """Show a running phase of unknown length."""

    @abstractmethod
    def _hide_phase(self, what: str) -> None:
        """Remove a phase if it is shown."""

    @abstractmethod
    def _show_count(self, what: str, done: int, total: int) -> None:
        """Show the number of finished items."""


class _Lines(_Display):
    """Shows progress as one line of text for each long phase, and for counted work."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._printed: set[str] = set()

    def _show_phase(self, what: str) -> None:
        self._print_once(f"{what} ...")

    def _hide_phase(self, what: str) -> None:
        """Do nothing: printed text stays."""

    def _show_count(self, what: str, done: int, total: int) -> None:
        self._print_once(f"{what}: {total} in all ...")

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print(text, file=self._stream, flush=True)


class _Bars(_Display):
    """Shows one line for each running phase, and a bar for counted work."""

    def __init__(self, stream: TextIO | None) -> None:
        """Show bars on a terminal's stream, or in a notebook for None."""
        super().__init__()
        # rich takes a tenth of a second to import, which programs without a terminal can skip.
        from rich.console import Console
        from rich.progress import Progress

        # Use this stream as it is, without redirection: phases redirect standard error while other code prints to it.
        console = Console(file=stream) if stream else Console(force_jupyter=True)
        self._progress = Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._tasks: dict[str, TaskID] = {}

    def stop(self) -> None:
        """Remove all phases and stop the bars."""
        super().stop()
        self._progress.stop()

    def _show_phase(self, what: str) -> None:
        self._tasks[what] = self._add(what, None)

    def _hide_phase(self, what: str) -> None:
        task = self._tasks.pop(what, None)
        if task is not None:
            self._progress.remove_task(task)

    def _show_count(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._add(what, total)
        self._progress.update(self._tasks[what], completed=done)

    def _add(self, what: str, total: int | None) -> TaskID:
        """Add a line and return its id."""
        self._progress.start()  # does nothing if the bars are already shown
        return self._progress.add_task(what, total=total)
