"""Undo what is changed for a while, whichever line an interrupt comes at.

Ctrl-C raises KeyboardInterrupt between any two instructions: before a `try` begins, or in the middle of a `finally`.
So whoever changes something for a while first notes in the thread's *journal* how it is changed back. Where the block
that changed it cannot do so, the outermost function does that is marked with `restores_all`:

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
"""Changes something back. It may be called before the change was made, and again after it was changed back."""


class _Journal(threading.local):
    """What one thread has to undo, the latest last."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def roll_back(self, begin: int) -> None:
        """Undo all entries from number `begin` on, the latest first; called again, it goes on where it stopped."""
        while len(self.entries) > begin:
            self.entries[-1].run()
            self.entries.pop()


class _Entry:
    """One thing to undo, once."""

    def __init__(self, undo: Undo) -> None:
        self.undo: Undo | None = undo

    def run(self) -> None:
        """Undo it, unless that is done."""
        if self.undo is not None:
            self.undo()
            self.undo = None


_journal = _Journal()


def _roll_back(begin: int, modes: Modes) -> None:
    """Undo all entries from number `begin` on, and put modes of torch back."""
    _journal.roll_back(begin)
    modes.put_back()


def restores_all(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, after which nothing is left to undo, whatever was raised in it, and at whichever line.

    Where it raises, the thread is in the modes of torch again that it was in before.
    """

    @wraps(function)
    def undoing(*args: P.args, **kwargs: P.kwargs) -> R:
        begin = len(_journal.entries)
        modes = Modes.read()
        # Twice: an interrupt may come in the middle of the first.
        try:
            try:
                return function(*args, **kwargs)
            finally:
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
    """Call `undo` after the block, or at the latest when the function marked with `restores_all` around it ends."""
    begin, entry = len(_journal.entries), _Entry(undo)
    _journal.entries.append(entry)
    try:
        yield
    finally:
        # An interrupt may have skipped this for blocks inside, and undone this one where the garbage collector comes
        # here later.
        if entry.undo is not None:
            _journal.roll_back(begin)


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call one after the other from C: an interrupt comes before all of them, or after, if they run no Python."""
    one_by_one: Any = map(operator.call, calls)  # mypy does not know a call without arguments
    deque(one_by_one, maxlen=0)


class CallerLock:
    """A lock that is free again after a block, whichever line an interrupt comes at.

    A thread that holds it may take it once more. While a thread waits for it, the thread is in a block that `waiting`
    returns, as one that lends what the holder may need.
    """

    def __init__(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._lock = threading.RLock()
        self._waiting = waiting
        self._holder: int | None = None

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds it."""
        return self._holder == threading.get_ident()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold the lock for the block, after waiting for it."""
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
        """Let other threads hold the lock in the block, where the calling thread does: it is to wait for them there."""
        if not self.mine:
            yield
            return
        with restore_after(self._take_back):
            self._give_back()
            yield

    def _take_back(self) -> None:
        """Hold the lock again, unless the calling thread does."""
        if not self.mine:
            self._lock.acquire()
            self._holder = threading.get_ident()

    def _give_back(self) -> None:
        """Free the lock, if the calling thread holds it."""
        if self.mine:
            self._holder = None
        # The lock knows best who holds it, and how often: an interrupt may have come before the holder was noted.
        with suppress(RuntimeError):
            while True:
                self._lock.release()
