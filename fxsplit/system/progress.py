"""Progress: long work reports how far it is, without knowing its listeners.

The work calls `track` and `phase`; a display calls `listen`. Without a listener nothing is shown. The end of each phase
is a log record too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from fxsplit.system.logs import emit

T = TypeVar("T")

Listener = Callable[[str, int, int], None]
"""Called with (name of the work, finished items, all items). A phase begins with 0 finished items."""


def _ignore(what: str, done: int, total: int) -> None:
    """Do nothing: the default listener."""


# A context variable: threads that work for one caller copy it, and threads of another caller do not see it.
_listener: ContextVar[Listener] = ContextVar("fxsplit progress listener", default=_ignore)


def has_listener() -> bool:
    """Return whether the current context has a listener."""
    return _listener.get() is not _ignore


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send the progress of all work in the block to `listener`, instead of any outer listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield `items` one by one, and report each item as finished when the next is asked for. `what` names the work."""
    # Read the listener once, since a thread with another context may consume the items.
    listener, begin = _listener.get(), time.perf_counter()
    for done, item in enumerate(items, 1):
        yield item
        listener(what, done, len(items))
    _log_end(what, begin)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Report the beginning and the end of the block as a phase of unknown progress."""
    listener, begin = _listener.get(), time.perf_counter()
    listener(what, 0, 1)
    failure = ", failed"
    try:
        yield
        failure = ""
    finally:
        listener(what, 1, 1)
        _log_end(what, begin, failure)


def _log_end(what: str, begin: float, failure: str = "") -> None:
    """Log that the work called `what` has ended. It began at second `begin` of `time.perf_counter()`."""
    seconds = time.perf_counter() - begin
    emit("phases", "phase", f"{what}: {seconds:.3f} s{failure}", phase=what, seconds=seconds, failed=bool(failure))
