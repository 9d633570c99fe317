"""FaultWatcher: a thread that ends a rank's waits where they are in vain.

A rank waits for messages inside of torch, where neither Python's signals nor other threads' exceptions reach it. So a
thread looks at the board, at the clock, and at signals that arrive, and makes the process groups fail where it must.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import inf

from torch.distributed import DistError

from fxsplit.errors import StepTimeout
from fxsplit.runtime.ranks.failures.board import FaultBoard
from fxsplit.runtime.ranks.failures.faults import Fault
from fxsplit.system.interrupts import raises_interrupts

LOOK_S = 0.1
"""How often the thread looks at the board while the rank is in a job."""
IDLE_LOOKS = 10
"""After so many times at which there was no job the thread sleeps until one begins."""
TELL_S = 0.4
"""How long ranks may take to tell what they do, once the limit of a job has passed."""
WAKE = b"\0"
"""What the rank sends to its thread when a job begins; signals have other numbers."""


class FaultWatcher:
    """Watches over the jobs of one rank.

    board: where failures are posted; this object's own. wake: makes all waits of this rank fail. describe: says what
        the rank is doing now.
    """

    def __init__(self, board: FaultBoard, wake: Callable[[], object], describe: Callable[[], str]) -> None:
        self._board = board
        self._wake = wake
        self._describe = describe
        self._ears, self._mouth = socket.socketpair()
        self._ears.setblocking(False)
        self._mouth.setblocking(False)
        # What the thread does to a job is done before the job ends, or not at all.
        self._turn = threading.Lock()
        self._until: float | None = None
        self._limit_s = 0.0
        # The limit that also holds for blocks inside: until when, and of how many seconds.
        self._firm = inf, inf
        self._uncounted_s = 0.0
        self._ended = False
        # Whether the thread sleeps until it is called, or is about to.
        self._sleeps = False
        # Signals that came to a file descriptor of another program in this process are handed on to it.
        self._others = -1
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, limit_s: float, *, firm: bool = False) -> Iterator[None]:
        """Watch over what the block does, which is given up after `limit_s`; blocks may lie in one another.

        firm: whether blocks inside have to end by then too, which else have limits of their own.
        """
        outer, outer_firm = (self._until, self._limit_s), self._firm
        with self._hear_signals() if outer[0] is None else nullcontext():
            if firm:
                self._firm = min(self._firm, (self._read_clock() + limit_s, limit_s))
            self._until, self._limit_s = min(self._firm, (self._read_clock() + limit_s, limit_s))
            self._start()
            # To wake it for each of many short jobs would take longer than most of what a job sends.
            if self._sleeps:
                self._call()
            try:
                yield
            finally:
                with self._turn:
                    # What was given up inside stays so.
                    self._until, self._limit_s = outer if self._until is not None else (None, 0.0)
                    self._firm = outer_firm

    @contextmanager
    def stop_clock(self, limit_s: float) -> Iterator[None]:
        """Let the block take `limit_s`, even where a firm limit is shorter: its time does not count for that one."""
        begin, firm, self._firm = time.monotonic(), self._firm, (inf, inf)
        try:
            with self.watch(limit_s):
                yield
        finally:
            with self._turn:
                self._firm = firm
                self._uncounted_s += time.monotonic() - begin

    def _read_clock(self) -> float:
        """Return the time in seconds, without that of blocks in which the clock stood still."""
        return time.monotonic() - self._uncounted_s

    def _start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._ended = False
            self._thread = threading.Thread(target=self._serve, name="fxsplit-watcher", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """End the thread; it starts again when there is something to watch over."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended = True
            self._call()
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _call(self) -> None:
        """Let the thread look at once."""
        # Bytes that it has not read yet will do as well.
        with suppress(BlockingIOError):
            self._mouth.send(WAKE)

    @contextmanager
    def _hear_signals(self) -> Iterator[None]:
        """Let the thread hear of signals at once, which Python itself handles only after a wait."""
        # Python takes this from the main thread alone, which is also the one that it interrupts.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._others = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(self._others, warn_on_full_buffer=False)

    # What the thread does

    def _serve(self) -> None:
        """Look again and again while jobs run, and else only when called."""
        idle = 0
        while not self._ended:
            # Said before the look at whether a job has begun, where `watch` begins one and then looks at this.
            self._sleeps = idle >= IDLE_LOOKS
            until = None if self._sleeps and self._until is None else LOOK_S
            ready, _, _ = select.select([self._ears], [], [], until)
            self._sleeps = False
            heard = self._ears.recv(4096) if ready else b""
            self._hand_on(heard.replace(WAKE, b""))
            idle += 1
            with self._turn:
                if self._until is not None and not self._ended:
                    idle = 0
                    self._look(interrupted=signal.SIGINT in heard)

    def _hand_on(self, signals: bytes) -> None:
        """Tell of signals where another program in this process, such as an event loop, waits to hear of them."""
        if signals and self._others >= 0:
            with suppress(OSError):
                os.write(self._others, signals)

    def _look(self, interrupted: bool) -> None:
        """End the job's waits where another rank has failed, the user interrupts it, or its time is over."""
        # Of a store that is gone, or a rank that hosted it, the waits themselves learn.
        with suppress(DistError):
            if self._read_clock() > (self._until or 0.0):
                self._post_timeout()
            elif not (self._board.read() or (interrupted and raises_interrupts())):
                return
            self._until = None
            self._wake()

    def _post_timeout(self) -> None:
        """Post that the job takes too long, with what each rank does."""
        self._board.tell(self._describe())
        time.sleep(TELL_S)
        told = self._board.list_told()
        doing = [f"rank {r}: {told.get(r, 'does not answer')}" for r in range(self._board.n_ranks)]
        error = StepTimeout(f"the step takes longer than {self._limit_s:g} s:\n" + "\n".join(doing))
        self._board.post(Fault.of(error, self._board.me))
