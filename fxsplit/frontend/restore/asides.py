"""Asides: code that runs in the midst of a call, and whose changes are none of the call's, such as an import.

Python runs a module's body once in a process, and torch.compile compiles a function once. Nobody will define their
names again, so the names must not be taken back. Whoever notes the changes of a call counts the changes of an aside
as made before the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from fxsplit.torch_internals.scopes.undo import restore_after


class Notes(Protocol):
    """Knows the state before a call."""

    def read(self) -> Any:
        """Return the state now."""

    def accept(self, begun: Any, *, new_only: bool) -> None:
        """Count the changes since `read` returned `begun` as made before the call.

        new_only: count only entries and attributes that did not exist.
        """


class _Kept(threading.local):
    """The notes that one thread keeps just now."""

    def __init__(self) -> None:
        self.notes: list[Notes] = []


_kept = _Kept()


@contextmanager
def keep_notes(notes: Notes) -> Iterator[None]:
    """Let `notes` accept the changes of asides inside the block."""
    with restore_after(partial(_drop, notes)):
        _kept.notes.append(notes)
        yield


def _drop(notes: Notes) -> None:
    """Take notes out of the list, as far as they are in it."""
    _kept.notes = [other for other in _kept.notes if other is not notes]


def begin_aside(*, new_only: bool = False) -> Callable[[], None]:
    """Begin an aside, and return the function that ends it; with `new_only`, only its new entries are accepted."""
    begun = [(notes, notes.read()) for notes in _kept.notes]

    def end() -> None:
        for notes, state in begun:
            notes.accept(state, new_only=new_only)

    return end
