"""Membership: which ranks of the default process group are still running. A rank that has left never comes back.

A program that ends says so in the store through which the ranks met. If it cannot, for example after `kill -9`, its
connections show it. For this there is a process group over which nothing is sent and that nobody breaks: it loses
connections only when a program is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count

import torch.distributed as dist
from torch.distributed import DistError

from fxsplit.runtime.ranks.failures.faults import Fault
from fxsplit.torch_internals.distributed.process_groups import clone_store, has_closed, make_group, read_timeout_s

LIMIT_S = 600.0
"""How long, in seconds, a rank waits for another, unless the user's process group sets a shorter limit."""
LOOK_S = 0.1
"""How often, in seconds, repeated callers look at connections: each look costs a message."""
SILENT = "its program has ended without a message, as after a signal or os._exit(), or has left the process group"
"""The text for a rank that has closed its connections."""
_numbers = count()


class Membership:
    """The ranks of the default process group. All of them make this object at the same time."""

    def __init__(self) -> None:
        default = dist.group.WORLD
        self.limit_s = min(read_timeout_s(default, LIMIT_S), LIMIT_S)
        self._default = default
        self.rank, self._n_ranks = dist.get_rank(), dist.get_world_size()
        self._process = os.getpid()
        self._store = clone_store()
        # Each restart by a launcher has its own number, and may use the store of the start before.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"fxsplit/{start}/membership/{next(_numbers)}"
        self._left: Fault | None = None
        self._looked = 0.0
        # Until the new group exists, the default group's connections show a rank that has ended.
        self._lines = default
        self._lines = make_group(range(self._n_ranks), self.limit_s, look=self.check)

    @property
    def holds(self) -> bool:
        """Whether these are the ranks of the present default process group."""
        return self._default is dist.group.WORLD

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank itself, and not a fork of the rank's process."""
        return os.getpid() == self._process

    def make_fault(self, error: BaseException | None) -> Fault:
        """Return the fault that says that this rank's program has ended, by an error or normally (None)."""
        why = ", and it makes no more calls" if error is None else f" by {Fault.of(error, self.rank)}"
        return Fault(self.rank, (), f"its program has ended{why}")

    def leave(self, fault: Fault) -> None:
        """Post that this rank has left, for the reason in `fault`."""
        self._store.set(f"{self._key}/{fault.rank}", fault.to_text())
        self._store.compare_set(self._key, "", fault.to_text())

    def find_left(self, *, sparing: bool = False) -> Fault | None:
        """Return the fault of the first rank that has left, or None if all ranks are there.

        sparing: for callers that repeat this call: look at connections only now and then, since each look costs a
            message.
        """
        if self._left is None:
            looks = not sparing or self._is_time_to_look()
            self._left = self._read(self._key) or (self._miss() if looks else None)
        return self._left

    def find_missing(self, is_ahead: Callable[[int], bool]) -> Fault | None:
        """Return the fault of a rank that has left and is needed, or None. It may be called repeatedly.

        is_ahead: returns whether a rank that has left had finished all that this rank may wait for.
        """
        left = self.find_left(sparing=True)
        if left is None or not is_ahead(left.rank):
            return left
        # The first rank that left is not needed, but a later one may be, and `find_left` keeps only the first.
        gone = self._list_gone() if self._is_time_to_look() else ()
        missed = next((rank for rank in gone if not is_ahead(rank)), None)
        return None if missed is None else self._read(f"{self._key}/{missed}") or Fault(missed, (), SILENT)

    def check(self) -> None:
        """Raise RankError if a rank has left."""
        if (left := self.find_left()) is not None:
            raise left.make_error(self._n_ranks)

    def _read(self, key: str) -> Fault | None:
        """Return the fault that a rank posted as it left, or None."""
        # The store may be gone with its host, a rank or the launcher.
        with suppress(DistError):
            if self._store.check([key]):
                return Fault.parse(self._store.get(key).decode())
        return None

    def _is_time_to_look(self) -> bool:
        """Return whether the last look at connections was so long ago that the next look is due."""
        return time.monotonic() > self._looked + LOOK_S

    def _list_gone(self) -> Iterator[int]:
        """Yield the ranks that have closed their connections. Connections are looked at one by one."""
        self._looked = time.monotonic()
        return (rank for rank in range(self._n_ranks) if rank != self.rank and has_closed(self._lines, rank))

    def _miss(self) -> Fault | None:
        """Return the fault of a rank that has closed its connection, or None."""
        gone = next(self._list_gone(), None)
        if gone is None:
            return None
        # A rank that could say why it ended has posted that already. Otherwise the first post counts, so that all ranks
        # report the same.
        missed = Fault(gone, (), SILENT)
        with suppress(DistError):
            return Fault.parse(self._store.compare_set(self._key, "", missed.to_text()).decode())
        return missed


_memberships: list[Membership] = []


def find_membership() -> Membership:
    """Return the membership of the default process group. If there is none yet, its ranks make it together."""
    _memberships[:] = [one for one in _memberships if one.holds] or [Membership()]
    return _memberships[0]
