"""The bars that show the progress of long work, on a terminal or in a notebook; see `fxsplit.system.progress`."""

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
"""Work that takes fewer seconds shows nothing."""


@contextmanager
def show_progress() -> Iterator[None]:
    """Show what work inside the block takes over a second, and how far it is.

    It is shown on standard error if that is a terminal, and below the cell of a notebook. A notebook without ipywidgets
    has a line of text for each phase. Anywhere else nothing is shown. A block inside of another shares its bars.
    """
    shown: _Display
    if has_listener():
        yield
        return
    # A program without a console, such as pythonw, has no standard error at all.
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
    """Show that the block takes over a second, if that can be shown (see show_progress)."""
    with show_progress(), phase(what):
        yield


def is_notebook() -> bool:
    """Return whether this program runs in the cells of a notebook."""
    # IPython is never loaded for this: a program in a notebook has it.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # A kernel has a link to the notebook; IPython in a terminal has none.
    return getattr(shell, "kernel", None) is not None


class _Display(ABC):
    """Hears of work from whichever thread, and shows what takes long."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._phases: dict[str, threading.Timer] = {}

    def hear(self, what: str, done: int, total: int) -> None:
        """Take note of progress, from whichever thread."""
        if done == 0:
            self._begin_phase(what)
        elif what in self._phases:
            self._end_phase(what)
        # It is shown late and once: work that follows fast would make it flicker.
        elif time.monotonic() - self._begin >= PATIENCE_S:
            with self._lock:
                self._show_count(what, done, total)

    def stop(self) -> None:
        """Show nothing any more."""
        for what in list(self._phases):
            self._end_phase(what)

    def _begin_phase(self, what: str) -> None:
        """Show a phase as soon as it has taken long enough: nothing tells of it until it ends."""
        timer = threading.Timer(PATIENCE_S, self._show_late, [what])
        timer.daemon = True
        self._phases[what] = timer
        timer.start()

    def _show_late(self, what: str) -> None:
        """Show a phase, if it still goes on."""
        with self._lock:
            if what in self._phases:
                self._show_phase(what)

    def _end_phase(self, what: str) -> None:
        """Show a phase no longer."""
        with self._lock:
            self._phases.pop(what).cancel()
            self._hide_phase(what)

    @abstractmethod
    def _show_phase(self, what: str) -> None:
        """Show a phase that is going on, without an end in sight."""

    @abstractmethod
    def _hide_phase(self, what: str) -> None:
        """Show a phase no longer, if it is shown."""

    @abstractmethod
    def _show_count(self, what: str, done: int, total: int) -> None:
        """Show how many items of some work are done."""


class _Lines(_Display):
    """A line of text for each phase that takes long, and for counted work."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._told: set[str] = set()

    def _show_phase(self, what: str) -> None:
        self._tell(f"{what} ...")

    def _hide_phase(self, what: str) -> None:
        """Leave the line where it is: what is printed stays."""

    def _show_count(self, what: str, done: int, total: int) -> None:
        self._tell(f"{what}: {total} in all ...")

    def _tell(self, text: str) -> None:
        """Print a line once."""
        if text not in self._told:
            self._told.add(text)
            print(text, file=self._stream, flush=True)


class _Bars(_Display):
    """One line for each phase that is going on, and a bar for work whose items are counted."""

    def __init__(self, stream: TextIO | None) -> None:
        """Show bars on a terminal's stream, or in a notebook if there is none."""
        super().__init__()
        # rich takes a tenth of a second to load, which programs without a terminal need not wait for.
        from rich.console import Console
        from rich.progress import Progress

        # The stream of now, and no other one in its place: phases redirect standard error, to which others print.
        console = Console(file=stream) if stream else Console(force_jupyter=True)
        self._progress = Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._tasks: dict[str, TaskID] = {}

    def stop(self) -> None:
        """Show nothing any more."""
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
        """Return a new line."""
        self._progress.start()  # does nothing for bars that are shown already
        return self._progress.add_task(what, total=total)
