"""Write checkpoints in threads while training goes on, in the order in which they were begun."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType

from torch import nn

from fxsplit.errors import FxsplitWarning
from fxsplit.system.logs import emit

SHORT_S = 1.0
"""How long a process that ends by an exception waits for a checkpoint over ranks, since other ranks may be gone."""


class Saving:
    """A checkpoint that is being written. It is at `path` after `wait()` has returned.

    The end of the process waits for the checkpoint, and so does `close()` of its pipeline. `wait()` raises the error
    that stopped the checkpoint. If nobody called `wait()`, `close()` or the next save of the same thread raises this
    error.
    model: the pipeline or module that is saved.
    over_ranks: whether other ranks write parts of the checkpoint.
    """

    def __init__(self, path: Path, write: Callable[[], None], model: nn.Module, *, over_ranks: bool = False) -> None:
        self.path = path
        self.model = weakref.ref(model)
        self.over_ranks = over_ranks
        self.caller = threading.current_thread()
        self._write: Callable[[], None] | None = write
        self._before: Sequence[Saving] = ()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._heard = False
        # A daemon: a thread that waits for lost ranks must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="fxsplit-saving", daemon=True)

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            for one in self._before:
                one.join()
            if self._write is not None:
                self._write()
        except BaseException as error:
            self._error, self._trace = error, error.__traceback__
        finally:
            # Free the copies of all values.
            self._before, self._write = (), None
        seconds, path = time.perf_counter() - begin, str(self.path)
        if self._error is None:
            emit("checkpoints", "saved", f"saved {path!r} in {seconds:.3f} s", path=path, seconds=seconds)
        else:
            emit("checkpoints", "save_failed", f"{path!r} was not saved", error=self._error, path=path, seconds=seconds)

    def start(self) -> None:
        """Begin to write, after the checkpoints that were begun before."""
        _register(os.getpid())
        with _changing:
            self._before = [one for one in _known if one.goes_before(self.model(), over_ranks=self.over_ranks)]
            self._thread.start()
            _known[:] = [one for one in _known if not one.is_complete] + [self]

    def goes_before(self, model: nn.Module | None, *, over_ranks: bool) -> bool:
        """Return whether the next checkpoint of `model` must wait for this one."""
        # Two ranks may save two pipelines in different orders. A single order for both would make each rank wait for
        # the other for ever.
        return self.model() is model if over_ranks else not self.over_ranks

    @property
    def done(self) -> bool:
        """Whether writing the checkpoint has ended, with success or failure."""
        return not self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """Whether the whole checkpoint is written, and is at `path`."""
        return self.done and self._error is None

    def join(self, limit_s: float | None = None) -> None:
        """Return when the checkpoint is written or has failed, or after `limit_s` seconds."""
        self._thread.join(limit_s)

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its path.

        Raises the error that stopped it, such as FileError.
        """
        self.join()
        self._heard = True
        # Its error has a traceback, which keeps the caller's variables alive.
        _forget(self)
        if self._error is None:
            return self.path
        # Without the frames of callers that have raised it before.
        raise self._error.with_traceback(self._trace)

    def hear(self) -> None:
        """Wait for the checkpoint. Raise the error that stopped it, unless `wait()` has already raised that error."""
        self.join()
        if not self._heard:
            self.wait()

    def warn(self) -> None:
        """Warn of the error that stopped the checkpoint, unless `wait()` has already raised that error."""
        if self._error is not None and not self._heard:
            self._heard = True
            warnings.warn(
                f"the checkpoint {str(self.path)!r} was not saved: {self._error}", FxsplitWarning, stacklevel=2
            )


_changing = threading.Lock()
_known: list[Saving] = []
"""The checkpoints of this process that `wait()` has not returned yet, in the order in which they are written."""


def _forget(saving: Saving) -> None:
    """Remove a checkpoint from the list of those being saved, and remove all that are complete."""
    with _changing:
        _known[:] = [one for one in _known if one is not saving and not one.is_complete]


def wait_for_saving(model: nn.Module, *, over_ranks: bool) -> None:
    """Wait for all checkpoints that the next checkpoint of a model must wait for.

    Raises the error that stopped a checkpoint of this thread, once.
    """
    for one in list(_known):
        if one.caller is threading.current_thread():
            one.hear()
        elif one.goes_before(model, over_ranks=over_ranks):
            one.join()


def finish_saving(model: nn.Module) -> None:
    """Wait for all checkpoints of a model. Raises the error that stopped one of them, once."""
    for one in list(_known):
        if one.model() is model:
            one.hear()


@cache
def _register(process: int) -> None:
    """Make the end of the process `process` wait for all checkpoints.

    Only the first call of a process does anything.
    """
    if parent_process() is None:
        atexit.register(_finish)
    else:  # multiprocessing calls only its own finalizers at the end of a process that it started
        Finalize(None, _finish, exitpriority=10)


def _finish() -> None:
    """Wait for all checkpoints as the process ends, and warn of errors that stopped them."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
    limit = time.monotonic() + SHORT_S
    for one in list(_known):
        # The error that ends this process may have ended other ranks too.
        one.join(None if ends_well or not one.over_ranks else max(limit - time.monotonic(), 0.0))
        one.warn()


def _forget_all() -> None:
    """Forget all checkpoints, in a process that was forked: the threads that write them are in its parent process."""
    global _changing
    _changing = threading.Lock()
    _known.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_all)
