"""Let no Ctrl-C be lost while fxsplit works.

Python raises KeyboardInterrupt in whatever code runs just then. In a finaliser, in the callback of a weak reference or
below some functions of C, every exception is dropped, that one too, and the program would go on as if nobody had
pressed anything. So public functions are marked with `lose_no_interrupt`: while one runs, the handler of SIGINT raises
as Python's own does, and also notes that it did. A noted interrupt that has not come out when the function ends, or at
a call of `raise_lost_interrupt`, is raised there.

Python's own handler alone is replaced, in the main thread, and for as long as the outermost of these functions runs. A
program that has set a handler of its own keeps it, also where it sets one in the meantime.
"""

from __future__ import annotations

# The module `signal` looks up each handler in an Enum, which takes longer than all else here: this is what it calls.
import _signal as signal  # type: ignore[import-not-found]
import os
import time

# Not threading's: a handler may run while the main thread holds a lock of that module.
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import ParamSpec, TypeVar

SWITCHES = os.path.join("torch", "utils", "_python_dispatch.py")
"""The file of torch in which no interrupt is raised."""
DEPTH = 3
"""How many calls deep that is looked for."""
AGAIN_S = 0.005
"""When it is tried again, in seconds."""

P = ParamSpec("P")
R = TypeVar("R")


class _Ear:
    """The handler of SIGINT for the time of one call."""

    def __init__(self) -> None:
        self.open = True
        self.noted = False
        self.thread = get_ident()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, and note it."""
        self.noted = True
        # Where torch switches a mode, code of C is around that ends the process when an exception comes through.
        if _is_switching(frame):
            start_new_thread(self._send_again, ())
            return
        signal.default_int_handler(number, frame)

    def _send_again(self) -> None:
        """Interrupt the main thread a moment later, if the call is not over by then."""
        time.sleep(AGAIN_S)
        # A signal also wakes a thread that waits. Windows has none to send.
        if self.open and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(self.thread, signal.SIGINT)
        elif self.open:
            interrupt_main()

    def begin(self) -> None:
        """Hear interrupts from now on; without effect in other threads than the main one, which alone can do so."""
        with suppress(ValueError):
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Put Python's own handler back, unless another one was set meanwhile; to do so again changes nothing."""
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # A debugger that was entered during the call may put this handler back later, which is then like Python's own.
        self.open = False


def _is_switching(frame: FrameType | None) -> bool:
    """Return whether a frame is torch's where it switches a mode, or what that calls."""
    for _ in range(DEPTH):
        if frame is None or frame.f_code.co_filename.endswith(SWITCHES):
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def lose_no_interrupt(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, out of which every Ctrl-C comes that was pressed while it ran, as one KeyboardInterrupt."""

    @wraps(function)
    def hearing(*args: P.args, **kwargs: P.kwargs) -> R:
        handler = signal.getsignal(signal.SIGINT)
        # The outermost call hears for those inside.
        closed = isinstance(handler, _Ear) and not handler.open
        if not closed and handler is not signal.default_int_handler:
            return function(*args, **kwargs)
        ear = _Ear()
        # Twice: an interrupt may come in the middle of the first.
        try:
            try:
                ear.begin()
                result = function(*args, **kwargs)
            finally:
                ear.end()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if ear.noted:
                raise KeyboardInterrupt from error
            raise
        finally:
            ear.end()
        if ear.noted:
            raise KeyboardInterrupt
        return result

    return hearing


def raises_interrupts() -> bool:
    """Return whether Ctrl-C raises KeyboardInterrupt now; a program may have set a handler that does something else."""
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or isinstance(handler, _Ear)


def raise_lost_interrupt() -> None:
    """Raise KeyboardInterrupt where one was lost since the outermost marked function began.

    To be called in no handler of exceptions, where an interrupt may be on its way out.
    """
    ear = signal.getsignal(signal.SIGINT)
    if isinstance(ear, _Ear) and ear.open and ear.noted and ear.thread == get_ident():
        raise KeyboardInterrupt
