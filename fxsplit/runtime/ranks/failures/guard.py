"""FaultGuard: lets every rank raise the first failure of any, wherever it happens and wherever the others wait.

A failure is posted on a board, and the process groups of whoever waits are broken, which wakes them. So groups are made
anew after each failure.
"""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cache
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, ProcessGroup

from fxsplit.errors import FxsplitError, RankError, RanksDiffer
from fxsplit.runtime.ranks.failures.board import FaultBoard, look_until
from fxsplit.runtime.ranks.failures.faults import Fault
from fxsplit.runtime.ranks.failures.membership import find_membership
from fxsplit.runtime.ranks.failures.watcher import FaultWatcher
from fxsplit.torch_internals.distributed.process_groups import (
    break_waits,
    clone_store,
    count_groups,
    count_groups_from,
    wait_until_returned,
)

BLAME_S = 2.0
"""How long a rank that has lost another one waits to learn why, before it says so itself."""
REST_S = 0.5
"""How long a process that ends waits for threads of torch's."""
SEEN_S = 1.0
"""How long a rank whose program ends with an error lets the others read it: a launcher ends them all then."""


class FaultGuard:
    """What ranks that run pipelines together tell each other of failures.

    name: what these ranks are called in the store that they met through. list_groups: the process groups in which this
        rank may wait for others. describe: says what this rank is doing, for a message about a limit that has passed.
    """

    def __init__(
        self,
        name: str,
        me: int,
        n_ranks: int,
        list_groups: Callable[[], Iterable[ProcessGroup]],
        describe: Callable[[], str],
    ) -> None:
        self._members = find_membership()
        # What blocks have been finished in this turn by this rank, and with whom it has met in the one that it is in.
        self._finished, self._met = Counter[tuple[int, ...]](), set[tuple[int, ...]]()
        self._board = FaultBoard(clone_store(), name, me, n_ranks, self._members, self._finished)
        # The thread has a board of its own, as one that waits in a store keeps others waiting.
        self._watched = FaultBoard(clone_store(), name, me, n_ranks, self._members, self._finished)
        self._list_groups = list_groups
        self._watcher = FaultWatcher(self._watched, self._break_waits, describe)
        self._watches = False
        self.is_broken = False
        """Whether the groups are of no use, since a failure."""
        self._is_over = False
        self.has_broken_off = False
        """Whether what this rank waits for was broken off here, as after a failure of another rank."""
        _guards.add(self)
        _hear_of_ends()

    @property
    def rank(self) -> int:
        """This rank's number among those of the guard, as faults have it."""
        return self._board.me

    @contextmanager
    def watch(self, limit_s: float, *, firm: bool = False, needed: frozenset[int] | None = None) -> Iterator[None]:
        """Watch over what all ranks do in the block, which may take `limit_s`; raises the first failure of any rank.

        A rank raises its own error where it has one. Otherwise it raises a RankError, which is also of the type of the
        first failure, and at once if a rank has left, unless that rank has finished this block before: it is not waited
        for. A block inside of another one only has a limit of its own.
        `firm`: the limit holds for those too. `needed`: the ranks of the default group that the block waits for; others
        may leave meanwhile (default: all).
        """
        if self._watches:
            with self._watcher.watch(limit_s, firm=firm):
                yield
            return
        if self.is_broken:
            self._refuse_after_left()
        self._watched.turn = self._board.turn
        self._board.needed = self._watched.needed = needed
        self._watches = True
        self.has_broken_off = False
        self._met.clear()
        try:
            with self._watcher.watch(limit_s, firm=firm):
                yield
            self._finished.update(self._met)
        except BaseException as error:
            fault = self._settle(error)
            if fault is None:
                raise
            raise fault.make_error(self._board.n_ranks) from error
        finally:
            self._watches = False

    def _refuse_after_left(self) -> None:
        """Raise RankError if a rank has left: no call is made together any more, and no rank needs to be told."""
        left = self._members.find_left()
        if left is None:
            return
        # What ended its program says more, and is raised once.
        with suppress(DistError):
            if not self._is_over and self._board.read_turn() is not None:
                return
        self._is_over = True
        raise left.make_error(self._board.n_ranks)

    def note_collective(self, ranks: tuple[int, ...]) -> None:
        """Note that these ranks of the default group have come to the block that this rank is in, as all of them do."""
        self._met.add(ranks)

    def fail(self, error: BaseException) -> None:
        """Let all other ranks know of an error that was raised outside of what is watched over."""
        if not self._watches:
            self._settle(error)

    def renew(self, make_groups: Callable[[], None], limit_s: float) -> None:
        """Make the groups anew where they are of no use since a failure, on all ranks.

        Raises RankError where a rank does not come for that.
        """
        if not self.is_broken:
            return
        try:
            self._renew(make_groups, limit_s)
        except DistError as lost:
            raise RankError(f"the store through which the ranks met is lost: {str(lost).splitlines()[0]}") from lost
        self.is_broken = False

    def _renew(self, make_groups: Callable[[], None], limit_s: float) -> None:
        """Make the groups anew, once all ranks have come."""
        # A rank that is late for the making would find the groups of others given up.
        # Longer than the limit: at that the watcher says what each rank does, which says more.
        limit_s += BLAME_S
        counts = self._board.gather(count_groups(), limit_s)
        if counts is None:
            raise RankError(f"rank {self._board.me} has waited for all ranks to go on after a failure")
        # Only some ranks may have made a group before they failed, and the next one would have two names.
        count_groups_from(max(counts))
        try:
            make_groups()
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(f"the groups of ranks are not made anew: {str(error).splitlines()[0]}") from error
        # A rank that went on at once and failed would leave others in the middle of making theirs.
        if self._board.gather(0, limit_s, "made") is None:
            raise RankError(f"rank {self._board.me} has waited for all ranks to make their groups anew")

    def check(self) -> None:
        """Raise RankError if a rank has failed in this turn, or has left and is waited for."""
        if (fault := self._board.read()) is not None:
            raise fault.make_error(self._board.n_ranks)

    def stop_clock(self, limit_s: float) -> AbstractContextManager[None]:
        """Let a block take `limit_s`; its time does not count for a firm limit of what is watched over."""
        return self._watcher.stop_clock(limit_s)

    def rest(self) -> None:
        """End the thread that watches, until there is something to watch over."""
        self._watcher.rest()

    def tell_finished(self) -> None:
        """Tell the other ranks which blocks this rank has finished; to be called before it leaves."""
        if self._members.is_mine:
            with suppress(DistError):
                self._board.tell_finished()

    def leave(self, error: BaseException | None) -> None:
        """Tell the other ranks that this rank's program has ended, so that none waits for it.

        With an error, wait a moment until they have read that.
        """
        if not self._members.is_mine:
            return
        # The store may be gone, with the rank or the launcher that kept it.
        with suppress(DistError):
            left, known = self._members.make_fault(error), self._members.find_left()
            if known is not None and known.rank != left.rank:
                # Whoever ended first does not wait for this rank, which ends too, as after Ctrl-C on all of them.
                self._board.end_turn()
                return
            # First: what ended the program says more than that it has ended. An end without an error is no failure.
            first = self._board.read_turn() if error is None else self._board.post(Fault.of(error, self._board.me))
            self._members.leave(left)
            if first is not None and first.rank != self._board.me:
                self._board.end_turn()
            elif error is not None and not isinstance(error, RankError):
                self._board.wait_until_seen(SEEN_S)

    def find_same(self, error: BaseException) -> RankError | None:
        """Post an error that ends this rank's program; return the same one of another rank that was first, or None."""
        if not self._members.is_mine:
            return None
        # The store may be gone, with the rank or the launcher that kept it.
        with suppress(DistError):
            own = Fault.of(error, self._board.me)
            first = self._board.post(own)
            if first.rank != own.rank and replace(first, rank=own.rank) == own:
                return first.make_error(self._board.n_ranks)
        return None

    def _settle(self, error: BaseException) -> Fault | None:
        """Let all ranks know of an error; return the failure that this rank is to raise in its place, or None."""
        own, fault = Fault.of(error, self._board.me), None
        try:
            # Connections of a rank that failed may close before it has said why.
            if isinstance(error, RankError):
                fault = self._board.wait_for_fault(BLAME_S)
            # Of a rank that has left without a word the others may not know yet.
            first = self._board.post(fault or own)
            # The error that is told may also be that of another rank, which posted it just now.
            if isinstance(error, RankError) and first != own:
                fault = first
            self._board.end_turn()
        except DistError as lost:
            error.add_note(f"The store through which the ranks met is lost: {lost}")
            # It is gone with the rank that kept it, perhaps.
            if isinstance(error, RankError):
                fault = look_until(self._members.find_left, BLAME_S)
        self.is_broken = True
        self._break_waits()
        return fault

    def _break_waits(self) -> None:
        """Wake this rank where it waits, and others where they wait for it."""
        self.has_broken_off = True
        for group in self._list_groups():
            break_waits(group)


# What ends a program reaches the other ranks too

_guards: weakref.WeakSet[FaultGuard] = weakref.WeakSet()


@cache
def _hear_of_ends() -> None:
    """Tell other ranks when the program of this process ends, whether by an error or not."""
    show = sys.excepthook

    def hear(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        told = _find_told_by_another(error)
        # A hook of the user's, as one that reports errors, is given what there is.
        if told is not None and (show is sys.__excepthook__ or show.__module__.startswith("torch.")):
            _show_line(show, told, traceback)
        else:
            show(kind, error, traceback)
        _leave_all(error)
        atexit.register(_end_soon)

    sys.excepthook = hear
    atexit.register(_end)
    if parent_process() is not None:
        # A process that multiprocessing has started calls no hook for an error, and a forked one nothing at its end.
        Finalize(None, _end_started, exitpriority=0)


def _find_told_by_another(error: BaseException) -> BaseException | None:
    """Return an error that another rank shows with its traceback, since it is that rank's or one of all ranks; or None.

    Of an error that ranks have come to by themselves, as of a wrong option, the first rank is named.
    """
    if isinstance(error, RanksDiffer):
        return error if dist.is_initialized() and dist.get_rank() > 0 else None
    if isinstance(error, RankError):
        return None if error.rank in (None, *(guard.rank for guard in _guards)) else error
    same = (guard.find_same(error) for guard in list(_guards)) if isinstance(error, FxsplitError) else ()
    found = next(filter(None, same), None)
    if found is None and error.__cause__ is not None:
        # A program that raises its own error from another rank's does so on each rank.
        cause = _find_told_by_another(error.__cause__)
        found = None if cause is None else RankError(f"{_shorten(cause)}, raised again as {_name(error)}")
    return found


def _show_line(show: Callable[..., Any], error: BaseException, traceback: TracebackType | None) -> None:
    """Show another rank's error in one line, with the line of this rank's program that it came out of."""
    # The first frame is the program's own. What this rank waited for meanwhile says nothing of the error.
    where = f' (at File "{traceback.tb_frame.f_code.co_filename}", line {traceback.tb_lineno})' if traceback else ""
    kind = RanksDiffer if isinstance(error, RanksDiffer) else RankError
    brief = kind(f"{_shorten(error)}{where}")
    show(type(brief), brief, None)


def _shorten(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).splitlines() or [""]
    return f"{lines[0]}{' ...' if lines[1:] else ''}"


def _name(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {_shorten(error)}"


def _end_started() -> None:
    """Tell all other ranks that the function has ended for which multiprocessing has started this process, and how."""
    error = sys.exc_info()[1]
    # torch's spawn() leaves with a number once it has noted an error.
    _leave_all(error.__context__ if isinstance(error, SystemExit) else error)
    wait_until_returned(REST_S)


def _end() -> None:
    """Tell all other ranks that the program ends, and let threads of torch's come to rest before Python ends."""
    _leave_all(None)
    wait_until_returned(REST_S)


def _end_soon() -> None:
    """Let a process that ends with an error be gone soon: other ranks wait for that, or their launcher does.

    Python would look through everything that torch has loaded for cycles, which takes a second of a processor. What is
    in a cycle is then freed with the process, and its finaliser does not run.
    """
    gc.freeze()


def _leave_all(error: BaseException | None) -> None:
    """Tell all other ranks that the program of this process ends."""
    # Of all guards first: the others learn from any of them that this rank has left.
    if error is None:
        for guard in list(_guards):
            guard.tell_finished()
    for guard in list(_guards):
        guard.leave(error)
        guard.rest()
