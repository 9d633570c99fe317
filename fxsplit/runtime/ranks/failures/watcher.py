"""A fault watcher: a thread that ends a rank's waits if their messages can never come.

A rank waits inside torch, out of reach of Python's signals and of other threads' exceptions. So a thread watches the
board, the clock and signals, and if necessary makes the process groups fail.
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
"""How often, in seconds, the thread looks at the board while the rank is in a job."""
IDLE_LOOKS = 10
"""After this many looks without a job, the thread sleeps until a job begins."""
TELL_S = 0.4
"""How long, in seconds, ranks may take to report their activity after a job's time limit."""
WAKE = b"\0"
"""The byte that wakes the thread when a job begins; no signal has this number."""


class FaultWatcher:
    """Watches the jobs of one rank, in a thread.

    board: the board of failures; no other object uses it.
    wake: makes all waits of this rank fail.
    describe: returns a text that says what the rank is doing.
    """

    def __init__(self, board: FaultBoard, wake: Callable[[], object], describe: Callable[[], str]) -> None:
        self._board = board
        self._wake = wake
        self._describe = describe
        self._ears, self._mouth = socket.socketpair()
        self._ears.setblocking(False)
        self._mouth.setblocking(False)
        # The thread acts on a job before the job ends, or not at all.
        self._turn = threading.Lock()
        self._until: float | None = None
        self._limit_s = 0.0
        # The limit that also binds inner blocks, as (end time, seconds).
        self._firm = inf, inf
        self._uncounted_s = 0.0
        self._ended = False
        # Whether the thread sleeps until it is called, or is about to.
        self._sleeps = False
        # Signals are passed on to this file descriptor of another library in the process, such as an event loop.
        self._others = -1
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, limit_s: float, *, firm: bool = False) -> Iterator[None]:
        """Watch the block, and give it up after `limit_s` seconds. Blocks may be nested.

        firm: this limit also binds inner blocks. Otherwise an inner block may have a longer limit.
        """
        outer, outer_firm = (self._until, self._limit_s), self._firm
        with self._hear_signals() if outer[0] is None else nullcontext():
            if firm:
                self._firm = min(self._firm, (self._read_clock() + limit_s, limit_s))
            self._until, self._limit_s = min(self._firm, (self._read_clock() + limit_s, limit_s))
            self._start()
            # Wake the thread only if it sleeps: waking it for each short job would take longer than the job's messages.
            if self._sleeps:
                self._call()
            try:
                yield
            finally:
                with self._turn:
                    # If an inner block was given up, this block is given up too.
                    self._until, self._limit_s = outer if self._until is not None else (None, 0.0)
                    self._firm = outer_firm

    @contextmanager
    def stop_clock(self, limit_s: float) -> Iterator[None]:
        """Give the block `limit_s` seconds, even inside a shorter firm limit.

        Its time does not count for outer blocks.
        """
        begin, firm, self._firm = time.monotonic(), self._firm, (inf, inf)
        try:
            with self.watch(limit_s):
                yield
        finally:
            with self._turn:
                self._firm = firm
                self._uncounted_s += time.monotonic() - begin

    def _read_clock(self) -> float:
        """Return the time in seconds, without the time of blocks in which the clock was stopped."""
        return time.monotonic() - self._uncounted_s

    def _start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._ended = False
            self._thread = threading.Thread(target=self._serve, name="fxsplit-watcher", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """End the thread. The next watched block starts a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended = True
            self._call()
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _call(self) -> None:
        """Wake the thread, so that it looks for failures at once."""
        # If the buffer is full, unread bytes will wake it anyway.
        with suppress(BlockingIOError):
            self._mouth.send(WAKE)

    @contextmanager
    def _hear_signals(self) -> Iterator[None]:
        """Make signals wake the thread at once. Python itself would handle them only after the wait inside torch."""
        # Python permits this only in the main thread, and signals interrupt only the main thread anyway.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._others = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(self._others, warn_on_full_buffer=False)

    # The thread

    def _serve(self) -> None:
        """Look for failures of other ranks: periodically while a block is watched, and otherwise when it is woken."""
        idle = 0
        while not self._ended:
            # Set this before checking for a job: `watch` begins a job first and then reads this flag.
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
        """Pass signals on to another library's file descriptor, such as an event loop's."""
        if signals and self._others >= 0:
            with suppress(OSError):
                os.write(self._others, signals)

    def _look(self, interrupted: bool) -> None:
        """End the waits of a job if another rank has failed, the user has interrupted, or the time limit is over."""
        # If the store or its host is gone, the waits fail by themselves.
        with suppress(DistError):
            if self._read_clock() > (self._until or 0.0):
                self._post_timeout()
            elif not (self._board.read() or (interrupted and raises_interrupts())):
                return
            self._until = None
            self._wake()

    def _post_timeout(self) -> None:
        """Post that the job takes longer than its limit, with a text for each rank that says what the rank is doing."""
        self._board.tell(self._describe())
        time.sleep(TELL_S)
        told = self._board.list_told()
        doing = [f"rank {r}: {told.get(r, 'does not answer')}" for r in range(self._board.n_ranks)]
        error = StepTimeout(f"the step takes longer than {self._limit_s:g} s:\n" + "\n".join(doing))
        self._board.post(Fault.of(error, self._board.me))
