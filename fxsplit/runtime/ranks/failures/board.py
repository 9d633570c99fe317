"""FaultBoard: where the ranks of a pipeline tell each other of failures, beside the channels that a failure may block.

It lies in the store through which the process group met. The launcher keeps that store, so it is there as long as any
rank is. The first failure that is posted counts for all ranks.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from fxsplit.runtime.ranks.failures.faults import Fault
from fxsplit.runtime.ranks.failures.membership import Membership

T = TypeVar("T")

LOOK_S = 0.02
"""How often a rank that waits for others to read looks again."""


class FaultBoard:
    """The failures of one pipeline's ranks, in a store that only this object uses.

    A failure ends a *turn* of the board. All ranks raise it, and go on with the next turn, in which there is none. A
    rank that has left is a failure of every turn, except for a call that it has finished before it left.

    name: what the pipeline is called in the store; other pipelines, and earlier starts of the program, have others.
    members: knows which ranks have left; None if nobody asks for it. finished: how many calls this rank has finished in
        this turn together with some ranks, by the numbers of those; whoever makes the calls counts them.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        me: int,
        n_ranks: int,
        members: Membership | None = None,
        finished: Counter[tuple[int, ...]] | None = None,
    ) -> None:
        self._store = store
        self._members = members
        self._finished = Counter[tuple[int, ...]]() if finished is None else finished
        self._name = name
        self.me = me
        self.n_ranks = n_ranks
        self.turn = 0
        self.needed: frozenset[int] | None = None
        """The ranks of the default group that this rank's call waits for; None for all."""

    def post(self, fault: Fault) -> Fault:
        """Post a failure of this rank, and return the first one of all ranks, which may be another."""
        first = self._store.compare_set(self._key("fault"), "", fault.to_text())
        return Fault.parse(first.decode())

    def read(self) -> Fault | None:
        """Return the failure of this turn, or that a rank has left which has not finished this call, or None."""
        found = self.read_turn()
        return self._members.find_missing(self._is_ahead) if found is None and self._members is not None else found

    def read_turn(self) -> Fault | None:
        """Return the failure that was posted in this turn, or None."""
        key = self._key("fault")
        # To ask for what is not there would wait for it.
        return Fault.parse(self._store.get(key).decode()) if self._store.check([key]) else None

    def wait_for_fault(self, limit_s: float) -> Fault | None:
        """Return the failure of this turn, or that any rank has left, or None if neither is known within a time."""
        find_left = self.read_turn if self._members is None else self._members.find_left
        return look_until(lambda: self.read_turn() or find_left(), limit_s)

    def gather(self, number: int, limit_s: float, where: str = "here") -> list[int] | None:
        """Return the numbers with which all ranks have come to a place in this turn, as soon as they have; None after
        a time.

        None where a failure is posted meanwhile, or a rank has left: one of them will not come.
        """
        self._store.set(self._key(f"{where}/{self.me}"), str(number))
        keys = [self._key(f"{where}/{rank}") for rank in range(self.n_ranks)]
        look_until(lambda: self._store.check(keys) or self.read(), limit_s)
        return [int(self._store.get(key)) for key in keys] if self._store.check(keys) else None

    def end_turn(self) -> None:
        """Note that this rank has read the failure, and begin the next turn."""
        self._store.set(self._key(f"seen/{self.me}"), "1")
        self.turn += 1
        self._finished.clear()

    def wait_until_seen(self, limit_s: float) -> bool:
        """Return whether all other ranks have read this turn's failure, as soon as they have, or after a time."""
        keys = [self._key(f"seen/{rank}") for rank in range(self.n_ranks) if rank != self.me]
        return look_until(lambda: self._store.check(keys), limit_s)

    def tell_finished(self) -> None:
        """Tell the other ranks which calls this rank has finished, before it leaves: they may still be in the last."""
        if self._members is not None:
            self._store.set(self._key(f"finished/{self._members.rank}"), json.dumps(list(self._finished.items())))

    def _is_ahead(self, rank: int) -> bool:
        """Return whether a rank that has left is not waited for: not needed in this call, or through with it."""
        assert self._members is not None, "somebody asks for ranks that have left"
        if self.needed is not None and rank not in self.needed:
            return True
        key = self._key(f"finished/{rank}")
        told = json.loads(self._store.get(key)) if self._store.check([key]) else []
        return any(n > self._finished[tuple(ranks)] for ranks, n in told if self._members.rank in ranks)

    def tell(self, what: str) -> None:
        """Tell the other ranks what this one is doing."""
        self._store.set(self._key(f"doing/{self.me}"), what)

    def list_told(self) -> Mapping[int, str]:
        """Return what those ranks are doing that have told it in this turn."""
        keys = {rank: self._key(f"doing/{rank}") for rank in range(self.n_ranks)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _key(self, what: str) -> str:
        return f"{self._name}/{self.turn}/{what}"


def look_until(look: Callable[[], T], limit_s: float) -> T:
    """Return what `look` finds, as soon as that is anything, or what it finds after a time."""
    until = time.monotonic() + limit_s
    while not (found := look()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return found
