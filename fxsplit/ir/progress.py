"""How long work tells a listener that it advances, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

Listener = Callable[[str, int, int], None]
"""Called with (what is done, items finished, items in all)."""


def _nobody(what: str, done: int, total: int) -> None:
    """Ignore progress."""


_listener: ContextVar[Listener] = ContextVar("fxsplit progress listener", default=_nobody)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send the progress of everything inside the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield `items` one by one, telling the listener after each."""
    listener = _listener.get()
    for done, item in enumerate(items, 1):
        yield item
        listener(what, done, len(items))
