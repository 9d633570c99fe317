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
from contextlib import contextmanager, suppress
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import ParamSpec, TypeVar

from fxsplit.system.tracebacks import leave_out_frames

CONTEXTS = contextmanager.__code__.co_filename
"""The file of Python whose code enters and leaves context managers that are written as generators."""
TORCH = f"{os.sep}torch{os.sep}"
"""A part of the path of each file of torch."""
AGAIN_S, MOST_S = 0.005, 1.0
"""The delay before the next attempt, and the longest delay of an interrupt, in seconds."""

P = ParamSpec("P")
R = TypeVar("R")


class _InterruptHandler:
    """The handler of SIGINT during one call of a public function. `noted`: an interrupt has come."""

    def __init__(self) -> None:
        self.open = True
        self.noted = False
        self.begun: float | None = None
        self.thread = get_ident()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the interrupt, and raise KeyboardInterrupt. If that is unsafe just now, try again a moment later."""
        self.noted = True
        now = time.monotonic()
        begun = now if self.begun is None else self.begun
        if _must_wait(frame) and now - begun < MOST_S:
            self.begun = begun
            start_new_thread(self._send_again, ())
            return
        self.begun = None
        signal.default_int_handler(number, frame)

    def _send_again(self) -> None:
        """Send the main thread the interrupt again after a moment, unless the call has ended."""
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


def _must_wait(frame: FrameType | None) -> bool:
    """Return whether an exception in a frame might leave torch half switched, or abort the process.

    torch is left half switched if it is entering or leaving a context, such as a mode. The process aborts in a
    `__torch_dispatch__`: autograd asks tensors without values for their sizes in C++ functions that must not throw.
    """
    inner = ""
    while frame is not None:
        name, file, outer = frame.f_code.co_name, frame.f_code.co_filename, frame.f_back
        # A context that is written as a generator has the file of the generator below, and that of its user above.
        files = (file, inner, outer.f_code.co_filename if outer else "") if file == CONTEXTS else (file,)
        if name in ("__enter__", "__exit__", "__torch_dispatch__") and any(TORCH in each for each in files):
            return True
        frame, inner = outer, file
    return False


def lose_no_interrupt(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a Ctrl-C during its call always ends the call with a KeyboardInterrupt.

    Other errors of the function get short tracebacks.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            leave_out_frames(error, function)
            raise

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
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
    """Return whether Ctrl-C raises KeyboardInterrupt at present. A program may have set another handler."""
    handler = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or isinstance(handler, _InterruptHandler)


def raise_lost_interrupt() -> None:
    """Raise KeyboardInterrupt if an interrupt was lost since the outermost decorated function began.

    Do not call this in an exception handler: there an interrupt may be on its way out, and is not lost.
    """
    ours = signal.getsignal(signal.SIGINT)
    if isinstance(ours, _InterruptHandler) and ours.open and ours.noted and ours.thread == get_ident():
        raise KeyboardInterrupt
