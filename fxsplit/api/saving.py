"""Saving: a checkpoint that is written while training goes on. One at a time is under way."""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

from fxsplit.errors import FxsplitWarning

SHORT_S = 1.0
"""How long a process that ends with an exception waits for its checkpoint: ranks that are lost never write theirs."""


class Saving:
    """A checkpoint that is being written: `path` is where it will be, once `wait()` has returned.

    A process that ends waits for it, and so does `close()` of its pipeline. What stopped it is raised by `wait()`, the
    next save or `close()`.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self._write = write
        self._error: BaseException | None = None
        # A daemon: what waits for ranks that are lost must not keep the process.
        self._thread = threading.Thread(target=self._run, name="fxsplit-saving", daemon=True)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def start(self) -> None:
        """Begin to write; the one before is waited for first, and raises what stopped it."""
        last = _Last.saving
        if last is not None:
            last.wait()
        _register()
        _Last.saving = self
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the checkpoint is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the path of the checkpoint once it is complete; raises what stopped it, such as FileError, once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is None:
            return self.path
        try:
            raise error
        finally:
            # Its traceback has this frame, and those of the caller, which would be kept with it.
            del error

    def finish(self) -> None:
        """Wait for the checkpoint as the process ends, and warn of what stopped it."""
        # An exception ends the process: what it is may have ended other ranks too.
        self._thread.join(SHORT_S if getattr(sys, "last_value", None) is not None else None)
        if self._error is not None:
            warnings.warn(
                f"the checkpoint {str(self.path)!r} was not saved: {self._error}", FxsplitWarning, stacklevel=2
            )


class _Last:
    """The checkpoint that was begun last in this process."""

    saving: Saving | None = None


def wait_for_saving() -> None:
    """Return when no checkpoint of this process is being written; raises what stopped the last one, once."""
    if _Last.saving is not None:
        _Last.saving.wait()


@cache
def _register() -> None:
    """Wait for the last checkpoint where the process ends."""
    atexit.register(_finish)


def _finish() -> None:
    if _Last.saving is not None:
        _Last.saving.finish()
