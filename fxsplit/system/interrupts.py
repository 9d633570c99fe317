"""Lose no Ctrl-C while fxsplit works.

Python raises KeyboardInterrupt in whatever code happens to run. In a finaliser, a weak reference's callback or below
some C functions, Python drops every exception, including this one, and the program would go on:

    lose_no_interrupt(function)  begin ............ finaliser ............ end
    Ctrl-C                                  ^ raised, dropped, noted       ^ raised again

So public functions are decorated with `lose_no_interrupt`. While one runs, the handler of SIGINT raises like Python's
own handler, and also notes the interrupt. If a noted interrupt has not come out by the end of the function, or by a
call of `raise_lost_interrupt`, it is raised there.

Only Python's own handler is replaced, in the main thread, while the outermost of these functions runs. A program keeps
a handler of its own, even if it sets one in the meantime.
"""

from __future__ import annotations

# signal.signal looks up each handler in an Enum, which takes longer than everything else here: call the C function.
import _signal as signal  # type: ignore[import-not-found]
import os
import time

# Not threading.get_ident: a handler may run while the main thread holds a lock of that module.
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import ParamSpec, TypeVar

SWITCHES = os.path.join("torch", "utils", "_python_dispatch.py")
"""The file of torch in which no interrupt may be raised."""
DEPTH = 3
"""The number of frames to search for it."""
AGAIN_S = 0.005
"""The delay before the next attempt, in seconds."""

P = ParamSpec("P")
R = TypeVar("R")


class _InterruptHandler:
    """The handler of SIGINT during one call."""

    def __init__(self) -> None:
        self.open = True
        self.noted = False
        self.thread = get_ident()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, and note it."""
        self.noted = True
        # While torch switches a mode, an exception would make its C code abort the process: try again later.
        if _is_switching(frame):
            start_new_thread(self._send_again, ())
            return
        signal.default_int_handler(number, frame)

    def _send_again(self) -> None:
        """Interrupt the main thread a moment later, unless the call has ended."""
        time.sleep(AGAIN_S)
        # A signal also wakes a waiting thread. Windows has no signal to send.
        if self.open and hasattr(signal, "pthread_kill"):
            signal.pthread_kill(self.thread, signal.SIGINT)
        elif self.open:
            interrupt_main()

    def begin(self) -> None:
        """Install this handler. Does nothing outside the main thread, the only one that may set handlers."""
        with suppress(ValueError):
            signal.signal(signal.SIGINT, self)

    def end(self) -> None:
        """Restore Python's own handler, unless a program has set its own meanwhile. May be called repeatedly."""
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # A debugger entered during the call may install this handler again later; it then acts like Python's own.
        self.open = False


def _is_switching(frame: FrameType | None) -> bool:
    """Return whether a frame, or one of its callers, is torch switching a mode."""
    for _ in range(DEPTH):
        if frame is None or frame.f_code.co_filename.endswith(SWITCHES):
            break
        frame = frame.f_back
    else:
        return False
    return frame is not None


def lose_no_interrupt(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that every Ctrl-C pressed during its call leaves it as one KeyboardInterrupt."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        handler = signal.getsignal(signal.SIGINT)
        # The outermost call handles interrupts for all inner calls.
        closed = isinstance(handler, _InterruptHandler) and not handler.open
        if not closed and handler is not signal.default_int_handler:
            return function(*args, **kwargs)
        ours = _InterruptHandler()
        # An interrupt may come in the middle of the inner `finally`, so call end() again in an outer one.
        try:
            try:
                ours.begin()
                result = function(*args, **kwargs)
            finally:
                ours.end()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if ours.noted:
                raise KeyboardInterrupt from error
            raise
        finally:
            ours.end()
        if ours.noted:
            raise KeyboardInterrupt
        return result

    return wrapper


def raises_interrupts() -> bool:
    """Return whether Ctrl-C raises KeyboardInterrupt now, since a program may have set another handler."""
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or isinstance(handler, _InterruptHandler)


def raise_lost_interrupt() -> None:
    """Raise KeyboardInterrupt if one was lost since the outermost decorated function began.

    Do not call it in an exception handler, since an interrupt may be on its way out there.
    """
    ours = signal.getsignal(signal.SIGINT)
    if isinstance(ours, _InterruptHandler) and ours.open and ours.noted and ours.thread == get_ident():
        raise KeyboardInterrupt
