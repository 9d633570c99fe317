"""A fault guard: every rank raises the first failure of any rank, even if the rank waits inside torch.

    rank 1: error --> post on the board --> break its own waits --> raise
    rank 0: in a wait; its watcher thread sees the board --> break waits --> raise the same error
    both:   next call makes new process groups

A failure is posted on a board, and the process groups of waiting ranks are broken, which ends the waits. So groups are
made again after each failure.
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
from logging import ERROR
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
from fxsplit.system.logs import emit
from fxsplit.torch_internals.distributed.process_groups import (
    break_waits,
    clone_store,
    count_groups,
    count_groups_from,
    wait_until_returned,
)

BLAME_S = 2.0
"""How long, in seconds, a rank that has lost another waits to learn why, before it posts the loss itself."""
REST_S = 0.5
"""How long, in seconds, an exiting process waits for torch's threads."""
SEEN_S = 1.0
"""How long, in seconds, an exiting rank lets others read its error. After it exits, a launcher may kill them all."""


class FaultGuard:
    """Shares failures between ranks that run pipelines together.

    name: the name of these ranks in the store through which they met.
    me, n_ranks: this rank's number, and the number of ranks.
    list_groups: returns the process groups in which this rank may wait.
    describe: returns a text that says what this rank is doing, for the message of a timeout.
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
        # The blocks that this rank has finished in this turn, by ranks, and the ranks that it has met in its present
        # block.
        self._finished, self._met = Counter[tuple[int, ...]](), set[tuple[int, ...]]()
        self._board = FaultBoard(clone_store(), name, me, n_ranks, self._members, self._finished)
        # The thread needs a store connection of its own: a wait in a store blocks other users of the connection.
        self._watched = FaultBoard(clone_store(), name, me, n_ranks, self._members, self._finished)
        self._list_groups = list_groups
        self._watcher = FaultWatcher(self._watched, self._break_waits, describe)
        self._watches = False
        self.is_broken = False
        """Whether a failure has made the groups unusable."""
        self._is_over = False
        self.has_broken_off = False
        """Whether this guard has broken off a wait of this rank, for example after another rank's failure."""
        _guards.add(self)
        _hear_of_ends()

    @property
    def rank(self) -> int:
        """This rank's number in faults."""
        return self._board.me

    @contextmanager
    def watch(self, limit_s: float, *, firm: bool = False, needed: frozenset[int] | None = None) -> Iterator[None]:
        """Guard a block that all ranks run, for at most `limit_s` seconds: raises the first failure of any rank.

        A rank with an error of its own raises its own error. Otherwise it raises a RankError that also has the type of
        the first failure. If a rank leaves, this raises at once, unless that rank has already finished this block.
        Blocks may be
        nested: the outermost block raises failures of other ranks, and an inner block only adds its time limit.

        firm: inner blocks cannot extend this limit.
        needed: the ranks of the default group that the block needs; other ranks may leave meanwhile (default: all).
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
        """Raise RankError if a rank has left: the ranks can make no further call together."""
        left = self._members.find_left()
        if left is None:
            return
        # The error that ended that rank's program says more than "it has left". Let the caller raise that error once.
        with suppress(DistError):
            if not self._is_over and self._board.read_turn() is not None:
                return
        self._is_over = True
        raise left.make_error(self._board.n_ranks)

    def note_collective(self, ranks: tuple[int, ...]) -> None:
        """Note that all of these ranks of the default group have taken part in this rank's present block."""
        self._met.add(ranks)

    def fail(self, error: BaseException) -> None:
        """Make all other ranks raise `error`, which this rank has raised outside a guarded block."""
        if not self._watches:
            self._settle(error)

    def renew(self, make_groups: Callable[[], None], limit_s: float) -> None:
        """Make the process groups again on all ranks if a failure has broken them.

        Raises RankError if a rank does not come to make them, within `limit_s` seconds.
        """
        if not self.is_broken:
            return
        try:
            self._renew(make_groups, limit_s)
        except DistError as lost:
            raise RankError(f"the store through which the ranks met is lost: {str(lost).splitlines()[0]}") from lost
        self.is_broken = False

    def _renew(self, make_groups: Callable[[], None], limit_s: float) -> None:
        """Wait for all ranks, and make the groups again."""
        # A rank that came late would find that the others had given up. Wait longer than the limit: at the limit the
        # watcher posts each rank's activity, which says more.
        limit_s += BLAME_S
        counts = self._board.gather(count_groups(), limit_s)
        if counts is None:
            raise RankError(f"rank {self._board.me} has waited for all ranks to go on after a failure")
        # Some ranks may have made a group before they failed: make all ranks name the next group alike.
        count_groups_from(max(counts))
        try:
            make_groups()
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(f"the groups of ranks cannot be made again: {str(error).splitlines()[0]}") from error
        # A rank that went on at once and failed would leave others waiting to make their groups.
        if self._board.gather(0, limit_s, "made") is None:
            raise RankError(f"rank {self._board.me} has waited for all ranks to make their groups again")

    def check(self) -> None:
        """Raise RankError if a rank has failed since the guarded block began, or if a needed rank has left."""
        if (fault := self._board.read()) is not None:
            raise fault.make_error(self._board.n_ranks)

    def stop_clock(self, limit_s: float) -> AbstractContextManager[None]:
        """Return a context that gives a block `limit_s` seconds.

        Its time does not count for a firm limit of an outer block.
        """
        return self._watcher.stop_clock(limit_s)

    def rest(self) -> None:
        """End the thread that watches for failures. The next guarded block starts it again."""
        self._watcher.rest()

    def tell_finished(self) -> None:
        """Publish which guarded blocks this rank has finished. Call it before the rank leaves."""
        if self._members.is_mine:
            with suppress(DistError):
                self._board.tell_finished()

    def leave(self, error: BaseException | None) -> None:
        """Tell the other ranks that this rank's program has ended, so that none waits for it.

        error: the error that ended the program (None: it ended normally). After an error, this waits briefly until
            other ranks have read it.
        """
        if not self._members.is_mine:
            return
        # The store may be gone with its host, a rank or the launcher.
        with suppress(DistError):
            left, known = self._members.make_fault(error), self._members.find_left()
            if known is not None and known.rank != left.rank:
                # Several ranks are ending, for example after Ctrl-C on all: the first does not wait for this one.
                self._board.end_turn()
                return
            # Post the error first: it says more than that the program has ended. An end without an error is not a
            #     failure.
            first = self._board.read_turn() if error is None else self._board.post(Fault.of(error, self._board.me))
            self._members.leave(left)
            if first is not None and first.rank != self._board.me:
                self._board.end_turn()
            elif error is not None and not isinstance(error, RankError):
                self._board.wait_until_seen(SEEN_S)

    def find_same(self, error: BaseException) -> RankError | None:
        """Post an error that ends this program.

        Returns another rank's error if that rank posted an equal error first, else None.
        """
        if not self._members.is_mine:
            return None
        # The store may be gone with its host, a rank or the launcher.
        with suppress(DistError):
            own = Fault.of(error, self._board.me)
            first = self._board.post(own)
            if first.rank != own.rank and replace(first, rank=own.rank) == own:
                return first.make_error(self._board.n_ranks)
        return None

    def _settle(self, error: BaseException) -> Fault | None:
        """Post an error for all ranks. Returns the failure that this rank should raise instead of `error`, or None."""
        own, fault = Fault.of(error, self._board.me), None
        try:
            # A failed rank's connections may close before it has posted its error.
            if isinstance(error, RankError):
                fault = self._board.wait_for_fault(BLAME_S)
            # Other ranks may not have noticed yet that a rank has left silently.
            posted = self._board.post(fault or own)
            # Another rank may have posted its own error just now.
            if isinstance(error, RankError) and posted != own:
                fault = posted
            self._board.end_turn()
        except DistError as lost:
            error.add_note(f"The store through which the ranks met is lost: {lost}")
            # The store may have been lost with the rank that hosted it.
            if isinstance(error, RankError):
                fault = look_until(self._members.find_left, BLAME_S)
        self.is_broken = True
        self._break_waits()
        first = own if fault is None else fault
        emit("faults", "rank_failed", f"rank {first.rank} has failed: {first}", level=ERROR, failed_rank=first.rank)
        return fault

    def _break_waits(self) -> None:
        """Wake this rank if it waits, and other ranks that wait for it."""
        self.has_broken_off = True
        for group in self._list_groups():
            break_waits(group)


# The end of this process

_guards: weakref.WeakSet[FaultGuard] = weakref.WeakSet()


@cache
def _hear_of_ends() -> None:
    """Register functions that tell other ranks when this process's program ends, with or without an error."""
    show = sys.excepthook

    def hear(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        told = _find_told_by_another(error)
        # A user's own hook, such as an error reporter, gets the full error.
        if told is not None and (show is sys.__excepthook__ or show.__module__.startswith("torch.")):
            _show_line(show, told, traceback)
        else:
            show(kind, error, traceback)
        _leave_all(error)
        atexit.register(_end_soon)

    sys.excepthook = hear
    atexit.register(_end)
    if parent_process() is not None:
        # multiprocessing's processes call no excepthook, and forked ones run no atexit functions.
        Finalize(None, _end_started, exitpriority=0)


def _find_told_by_another(error: BaseException) -> BaseException | None:
    """Return an error that another rank shows with its traceback, or None if this rank must show its own.

    If several ranks have raised the same error by themselves, for example for a wrong option, the first rank shows it.
    """
    if isinstance(error, RanksDiffer):
        return error if dist.is_initialized() and dist.get_rank() > 0 else None
    if isinstance(error, RankError):
        return None if error.rank in (None, *(guard.rank for guard in _guards)) else error
    same = (guard.find_same(error) for guard in list(_guards)) if isinstance(error, FxsplitError) else ()
    found = next(filter(None, same), None)
    if found is None and error.__cause__ is not None:
        # A program may raise its own error from (`raise ... from`) another rank's error. All ranks then do so.
        cause = _find_told_by_another(error.__cause__)
        found = None if cause is None else RankError(f"{_shorten(cause)}, raised again as {_name(error)}")
    return found


def _show_line(show: Callable[..., Any], error: BaseException, traceback: TracebackType | None) -> None:
    """Show another rank's error in one line, with the line of this rank's program that raised it."""
    # The first frame is the program's own. The wait that the error ended says nothing about its cause.
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
    """Tell all other ranks that the function of this multiprocessing process has ended, and how."""
    error = sys.exc_info()[1]
    # torch's spawn() exits with a number after it has recorded an error.
    _leave_all(error.__context__ if isinstance(error, SystemExit) else error)
    wait_until_returned(REST_S)


def _end() -> None:
    """Tell all other ranks that the program ends, and let torch's threads finish first."""
    _leave_all(None)
    wait_until_returned(REST_S)


def _end_soon() -> None:
    """Make a process that ends with an error exit quickly: other ranks, or the launcher, wait for its end.

    Python would search all of torch's objects for reference cycles, which takes a second of processor time. `gc.freeze`
    prevents that: objects in cycles are freed with the process, and their finalisers do not run.
    """
    gc.freeze()


def _leave_all(error: BaseException | None) -> None:
    """Tell all other ranks that the program of this process ends."""
    # Publish finished blocks on all guards first: any guard's `leave` shows the other ranks that this rank has left.
    if error is None:
        for guard in list(_guards):
            guard.tell_finished()
    for guard in list(_guards):
        guard.leave(error)
        guard.rest()
