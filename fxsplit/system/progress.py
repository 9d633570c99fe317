"""Progress: work that takes long tells how far it has come, without knowing who listens.

`track` and `phase` are called by the work, `listen` by who shows it. With no listener nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

Listener = Callable[[str, int, int], None]
"""Called with (what is done, items finished, items in all). None is finished where a phase begins."""


def _ignore(what: str, done: int, total: int) -> None:
    """Do nothing: the listener where nobody listens."""


# A context variable, since threads that work for one caller copy it, and those of another caller do not see it.
_listener: ContextVar[Listener] = ContextVar("fxsplit progress listener", default=_ignore)


def has_listener() -> bool:
    """Return whether somebody listens to the progress of work here."""
    return _listener.get() is not _ignore


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send the progress of all work inside the block to `listener`, in place of the listener outside of it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield `items` one by one, and tell the listener after each is done; `what` is what the work is called."""
    # Read once: the items may be asked for in a thread that has another context.
    listener = _listener.get()
    for done, item in enumerate(items, 1):
        yield item
        listener(what, done, len(items))


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Tell the listener when the work inside the block begins, and when it is over; nobody knows how far it is."""
    listener = _listener.get()
    listener(what, 0, 1)
    try:
        yield
    finally:
        listener(what, 1, 1)
