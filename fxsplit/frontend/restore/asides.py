"""Asides: code that runs in the middle of a call, but whose changes do not belong to the call, such as an import.

Python runs a module's body once in a process, and torch.compile compiles a function once. What they define would not be
defined a second time, so it must not be removed after the call. So the objects that restore the state before a call
(`Notes`) treat the changes of an aside as made before the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from fxsplit.torch_internals.scopes.undo import restore_after


class Notes(Protocol):
    """Knows the state before a call, to restore it."""

    def read(self) -> Any:
        """Return the present state."""

    def accept(self, begun: Any, *, new_only: bool) -> None:
        """Treat the changes since `read` returned `begun` as made before the call.

        new_only: accept only entries and attributes that did not exist before.
        """


class _Kept(threading.local):
    """The Notes objects of the calls that one thread is making."""

    def __init__(self) -> None:
        self.notes: list[Notes] = []


_kept = _Kept()


@contextmanager
def keep_notes(notes: Notes) -> Iterator[None]:
    """Inside the block, let `notes` accept the changes of asides in this thread."""
    with restore_after(partial(_drop, notes)):
        _kept.notes.append(notes)
        yield


def _drop(notes: Notes) -> None:
    """Remove notes from the list if they are in it."""
    _kept.notes = [other for other in _kept.notes if other is not notes]


def begin_aside(*, new_only: bool = False) -> Callable[[], None]:
    """Begin an aside, and return the function that ends it. `new_only`: accept only new entries and attributes."""
    begun = [(notes, notes.read()) for notes in _kept.notes]

    def end() -> None:
        for notes, state in begun:
            notes.accept(state, new_only=new_only)

    return end
