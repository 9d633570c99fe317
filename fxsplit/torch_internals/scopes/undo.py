"""Restore temporary changes after a block, even if an interrupt comes, at whichever line.

Ctrl-C raises KeyboardInterrupt between any two instructions: before a `try` begins, or in the middle of a `finally`. So
code that makes a temporary change first records in the thread's *journal* how to undo it. If the block is interrupted
before it can undo the change, the outermost function marked with `restores_all` does so:

    @restores_all
    def compile(...):
        with restore_after(partial(setattr, model, "forward", model.forward)):
            model.forward = traced
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fxsplit.torch_internals.scopes.modes import Modes

P = ParamSpec("P")
R = TypeVar("R")
Undo = Callable[[], object]
"""Undoes a change. It may be called before the change was made, and again after it was undone."""
Entry = list[Undo]
"""A list that holds the function which undoes a change. It is emptied after the function has run."""


class _Journal(threading.local):
    """The changes that one thread has to undo, the latest last."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def roll_back(self, begin: int) -> None:
        """Undo all entries from number `begin` on, the latest first. If interrupted, a second call continues."""
        while len(self.entries) > begin:
            entry = self.entries[-1]
            if entry:
                entry[0]()
                entry.clear()
            self.entries.pop()


_journal = _Journal()


def _roll_back(begin: int, modes: Modes) -> None:
    """Undo all entries from number `begin` on, and restore torch's modes."""
    _journal.roll_back(begin)
    modes.put_back()


def restores_all(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that nothing is left to undo after it, even if an interrupt comes at any line.

    If it raises, torch's modes in this thread are restored too.
    """

    @wraps(function)
    def undoing(*args: P.args, **kwargs: P.kwargs) -> R:
        begin = len(_journal.entries)
        modes = Modes.read()
        # Roll back twice below: an interrupt may end the first call.
        try:
            try:
                return function(*args, **kwargs)
            finally:
                if len(_journal.entries) > begin:
                    _journal.roll_back(begin)
        except BaseException:
            try:
                _roll_back(begin, modes)
            finally:
                _roll_back(begin, modes)
            raise

    return undoing


@contextmanager
def restore_after(undo: Undo) -> Iterator[None]:
    """Call `undo` after the block, or at the latest at the end of the enclosing function marked with `restores_all`."""
    begin, entry = len(_journal.entries), [undo]
    _journal.entries.append(entry)
    try:
        yield
    finally:
        # An interrupt may have skipped this line for inner blocks. It may also have skipped it here, so that the
        # garbage collector runs it later, after the undo has been done.
        if entry:
            _journal.roll_back(begin)


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call functions in order, from C code. If they run no Python, an interrupt comes before or after all of them."""
    one_by_one: Any = map(operator.call, calls)  # mypy does not know a call without arguments
    deque(one_by_one, maxlen=0)


class CallerLock:
    """A lock that is free after a block, at whichever line an interrupt comes.

    The thread that holds it may take it again.
    waiting: returns a context for a thread that waits for the lock, for example to lend things that the holder may
        need.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._lock = threading.RLock()
        self._waiting = waiting
        self._holder: int | None = None

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._holder == threading.get_ident()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the lock, and hold it for the block."""
        if self.mine:
            yield
            return
        with restore_after(self._give_back):
            if not self._lock.acquire(blocking=False):
                with self._waiting():
                    self._lock.acquire()
            self._holder = threading.get_ident()
            yield

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Release the lock inside the block, if the calling thread holds it.

        The thread waits for other threads meanwhile.
        """
        if not self.mine:
            yield
            return
        with restore_after(self._take_back):
            self._give_back()
            yield

    def _take_back(self) -> None:
        """Take the lock again, unless the calling thread holds it."""
        if not self.mine:
            self._lock.acquire()
            self._holder = threading.get_ident()

    def _give_back(self) -> None:
        """Release the lock, if the calling thread holds it."""
        if self.mine:
            self._holder = None
        # Ask the lock itself, since an interrupt may have come before the holder was recorded.
        with suppress(RuntimeError):
            while True:
                self._lock.release()
