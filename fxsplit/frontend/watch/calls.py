"""Watch the calls of a user's function, such as a loss: record the changes of each call, and undo them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from fxsplit.frontend.watch.changes import list_lasting
from fxsplit.frontend.watch.watch import SeenPlace, Watch
from fxsplit.torch_internals.fake.snapshot import Snapshot


class CallWatch:
    """Records what the first two calls of a function change: its buffers, and Python values that it reads or writes.

    A change that both calls make is a side effect. A change that only the first call makes is a cache.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        while isinstance(function, partial):
            function = function.func
        module = function if isinstance(function, nn.Module) else nn.Module()
        self._watch = Watch(module, kind="its attribute")
        self._watch.begin_at(function)
        self._buffers = dict(module.named_buffers())
        self._before = Snapshot(self._buffers.values())
        self._rounds: list[dict[SeenPlace, Any]] = []

    @contextmanager
    def note(self) -> Iterator[None]:
        """Record the changes of the call inside the block, in addition to the changes of earlier calls."""
        if len(self._rounds) == 2:
            yield
            return
        with self._watch.note():
            yield
        self._rounds.append(self._watch.find_changes())

    def list_changes(self) -> list[str]:
        """Return a text for each change that every call makes. Call this before `put_back`."""
        first, again = self._rounds
        changed = {id(b) for b in self._before.changed()}
        words = [f"its buffer {name!r}" for name, b in self._buffers.items() if id(b) in changed]
        return words + [seen.describe_change(first[seen]) for seen in list_lasting(first, again)]

    def put_back(self) -> None:
        """Restore all values to what they were before the first call."""
        self._watch.put_back()
        self._before.restore()
