"""A fault board: ranks post failures here. It is separate from message channels, which a failure may block.

    rank 1 fails --> post(fault) --> [store: turn 3 / fault] <-- read() <-- rank 0, rank 2
    all ranks raise it, then end_turn() --> turn 4, without a fault

The board is in the store through which the process group met. The launcher keeps that store, so it lives as long as any
rank. The first failure that is posted counts for all ranks.
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
"""How often, in seconds, a waiting rank looks at the store again."""


class FaultBoard:
    """The failures of one pipeline's ranks, in a store connection that only this object uses.

    A failure ends a *turn* of the board. All ranks raise the failure and go on with the next turn, which has none. A
    rank that has left counts as a failure in every turn, except for a call that it finished before it left.

    name: the pipeline's name in the store; other pipelines, and earlier starts of the program, have other names.
    me, n_ranks: this rank's number, and the number of ranks.
    members: knows which ranks have left (None: nobody tracks them).
    finished: for each group of ranks, how many calls this rank has finished with them in this turn; the caller counts.
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
        """The ranks of the default group that this rank's call waits for (None: all)."""

    def post(self, fault: Fault) -> Fault:
        """Post this rank's failure, and return the first failure of all ranks, which may be another rank's."""
        first = self._store.compare_set(self._key("fault"), "", fault.to_text())
        return Fault.parse(first.decode())

    def read(self) -> Fault | None:
        """Return this turn's failure, or the loss of a rank that has not finished this call, or None if all is well."""
        found = self.read_turn()
        return self._members.find_missing(self._is_ahead) if found is None and self._members is not None else found

    def read_turn(self) -> Fault | None:
        """Return the failure that was posted in this turn, or None."""
        key = self._key("fault")
        # Check first: getting a missing key would wait for it.
        return Fault.parse(self._store.get(key).decode()) if self._store.check([key]) else None

    def wait_for_fault(self, limit_s: float) -> Fault | None:
        """Return this turn's failure, or the loss of any rank; None if neither is known after `limit_s` seconds."""
        find_left = self.read_turn if self._members is None else self._members.find_left
        return look_until(lambda: self.read_turn() or find_left(), limit_s)

    def gather(self, number: int, limit_s: float, where: str = "here") -> list[int] | None:
        """Wait until all ranks have come to the place `where` in this turn, and return their numbers.

        Returns None after `limit_s` seconds, or if a failure is posted or a rank leaves meanwhile: then a rank will not
        come.
        """
        self._store.set(self._key(f"{where}/{self.me}"), str(number))
        keys = [self._key(f"{where}/{rank}") for rank in range(self.n_ranks)]
        look_until(lambda: self._store.check(keys) or self.read(), limit_s)
        return [int(self._store.get(key)) for key in keys] if self._store.check(keys) else None

    def end_turn(self) -> None:
        """Note that this rank has read the failure, and begin the next turn, which has no failure."""
        self._store.set(self._key(f"seen/{self.me}"), "1")
        self.turn += 1
        self._finished.clear()

    def wait_until_seen(self, limit_s: float) -> bool:
        """Wait at most `limit_s` seconds until all other ranks have read the failure; return whether they have."""
        keys = [self._key(f"seen/{rank}") for rank in range(self.n_ranks) if rank != self.me]
        return look_until(lambda: self._store.check(keys), limit_s)

    def tell_finished(self) -> None:
        """Let other ranks know which calls this rank has finished. Call it before this rank leaves.

        Other ranks may still be in the last of these calls. They then know that it does not need this rank any more.
        """
        if self._members is not None:
            self._store.set(self._key(f"finished/{self._members.rank}"), json.dumps(list(self._finished.items())))

    def _is_ahead(self, rank: int) -> bool:
        """Return whether this rank's call can end without a rank that has left.

        This is so if the call does not need that rank, or if that rank has already finished the call.
        """
        assert self._members is not None, "somebody asks for ranks that have left"
        if self.needed is not None and rank not in self.needed:
            return True
        key = self._key(f"finished/{rank}")
        told = json.loads(self._store.get(key)) if self._store.check([key]) else []
        return any(n > self._finished[tuple(ranks)] for ranks, n in told if self._members.rank in ranks)

    def tell(self, what: str) -> None:
        """Publish a text that says what this rank is doing."""
        self._store.set(self._key(f"doing/{self.me}"), what)

    def list_told(self) -> Mapping[int, str]:
        """Return, by rank, the texts that ranks have published with `tell` in this turn."""
        keys = {rank: self._key(f"doing/{rank}") for rank in range(self.n_ranks)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _key(self, what: str) -> str:
        return f"{self._name}/{self.turn}/{what}"


def look_until(look: Callable[[], T], limit_s: float) -> T:
    """Call `look` until it returns something true or `limit_s` seconds have passed; return its last result."""
    until = time.monotonic() + limit_s
    while not (found := look()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return found
