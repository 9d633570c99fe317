"""Membership: which ranks of the default process group are there. A rank whose program has ended never comes back.

A program that ends says so in the store through which the ranks met. One that cannot, as after `kill -9`, is missed by
its connections: a group that nothing is sent over, and that nobody breaks, loses them when the program is gone.
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
"""How long a rank waits for another one, unless the user's process group says otherwise."""
LOOK_S = 0.1
"""How often connections are looked at by who asks again and again: each look leaves a message that is asked for."""
SILENT = "its program has ended without a word, as by a signal or os._exit(), or has left the process group"
"""All that is known of a rank whose connections are closed."""
_numbers = count()


class Membership:
    """The ranks of the default process group, which all make one of these at the same time."""

    def __init__(self) -> None:
        default = dist.group.WORLD
        self.limit_s = min(read_timeout_s(default, LIMIT_S), LIMIT_S)
        self._default = default
        self.rank, self._n_ranks = dist.get_rank(), dist.get_world_size()
        self._process = os.getpid()
        self._store = clone_store()
        # Each start by a launcher has a number of its own, and may use the store of the one before.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"fxsplit/{start}/membership/{next(_numbers)}"
        self._left: Fault | None = None
        self._looked = 0.0
        # A rank that has ended before its first pipeline is missed by the connections of the default group.
        self._lines = default
        self._lines = make_group(range(self._n_ranks), self.limit_s, look=self.check)

    @property
    def holds(self) -> bool:
        """Whether these are the ranks of the default process group that there is now."""
        return self._default is dist.group.WORLD

    @property
    def is_mine(self) -> bool:
        """Whether this process is the rank, and not one that was forked from it."""
        return os.getpid() == self._process

    def make_fault(self, error: BaseException | None) -> Fault:
        """Return the fault that says that the program of this rank has ended, by an error or well."""
        why = ", and it makes no more calls" if error is None else f" by {Fault.of(error, self.rank)}"
        return Fault(self.rank, (), f"its program has ended{why}")

    def leave(self, fault: Fault) -> None:
        """Tell all ranks that this one has left."""
        self._store.set(f"{self._key}/{fault.rank}", fault.to_text())
        self._store.compare_set(self._key, "", fault.to_text())

    def find_left(self, *, sparing: bool = False) -> Fault | None:
        """Return that a rank has left, the first one that did, or None.

        sparing: for who asks again and again; connections are not looked at each time.
        """
        if self._left is None:
            looks = not sparing or self._is_time_to_look()
            self._left = self._read(self._key) or (self._miss() if looks else None)
        return self._left

    def find_missing(self, is_ahead: Callable[[int], bool]) -> Fault | None:
        """Return that a rank has left and is waited for, or None; for who asks again and again.

        is_ahead: whether a rank that has left has finished all that this rank may wait for.
        """
        left = self.find_left(sparing=True)
        if left is None or not is_ahead(left.rank):
            return left
        # The first that left is not waited for, and another one may be, which is not remembered by `find_left`.
        gone = self._list_gone() if self._is_time_to_look() else ()
        missed = next((rank for rank in gone if not is_ahead(rank)), None)
        return None if missed is None else self._read(f"{self._key}/{missed}") or Fault(missed, (), SILENT)

    def check(self) -> None:
        """Raise RankError where a rank has left."""
        if (left := self.find_left()) is not None:
            raise left.make_error(self._n_ranks)

    def _read(self, key: str) -> Fault | None:
        """Return what a rank has said that has left."""
        # The store may be gone, with the rank or the launcher that kept it.
        with suppress(DistError):
            if self._store.check([key]):
                return Fault.parse(self._store.get(key).decode())
        return None

    def _is_time_to_look(self) -> bool:
        """Return whether connections have not been looked at for a while."""
        return time.monotonic() > self._looked + LOOK_S

    def _list_gone(self) -> Iterator[int]:
        """Return the ranks whose connections are closed, which are looked at one by one."""
        self._looked = time.monotonic()
        return (rank for rank in range(self._n_ranks) if rank != self.rank and has_closed(self._lines, rank))

    def _miss(self) -> Fault | None:
        """Return that a rank has left whose connection is closed."""
        gone = next(self._list_gone(), None)
        if gone is None:
            return None
        # A rank that can say why it ends has done so before. Of one that cannot, all others are to say the same.
        missed = Fault(gone, (), SILENT)
        with suppress(DistError):
            return Fault.parse(self._store.compare_set(self._key, "", missed.to_text()).decode())
        return missed


_memberships: list[Membership] = []


def find_membership() -> Membership:
    """Return the membership of the default process group, which is made by its ranks together where there is none."""
    _memberships[:] = [one for one in _memberships if one.holds] or [Membership()]
    return _memberships[0]
