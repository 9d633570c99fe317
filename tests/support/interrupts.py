"""Press Ctrl-C at one exact line of fxsplit or of the context managers that it uses, or raise another error there."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.amp import autocast_mode
from torch.autograd import grad_mode, graph
from torch.utils import _device, _python_dispatch

import fxsplit

ROOT = Path(fxsplit.__file__).resolve().parent.parent
TESTS = [f"{ROOT}/tests/torch_internals/scopes/test_{name}.py" for name in ("undo", "modes")]
FILES = (f"{ROOT}/fxsplit/", f"{ROOT}/passes/", *TESTS, contextlib.__file__)
TORCH = tuple(module.__file__ or "?" for module in (grad_mode, graph, autocast_mode, _device, _python_dispatch))
"""torch's own context managers: interrupted in torch.export, some of them make torch abort the process."""
Line = tuple[str, int]
"""The file and the number of a line."""


class Dropped(KeyboardInterrupt):
    """Stands for a KeyboardInterrupt that Python drops, such as one in a finaliser."""


class Finalised:
    """Presses Ctrl-C when it is deleted."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@functools.cache
def is_traced(file: str, files: tuple[str, ...]) -> bool:
    """Return whether a file's lines are interrupted."""
    return str(Path(file).resolve()).startswith(files) if file[:1] == "/" else False


def trace(visit: Callable[[FrameType], None], files: tuple[str, ...]) -> Any:
    """Return a trace function that calls `visit` at every line of the files, which may raise."""

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            visit(frame)
        return at_line

    return lambda frame, event, _: at_line if is_traced(frame.f_code.co_filename, files) else None


def list_lines(run: Callable[[], object], files: tuple[str, ...] = FILES) -> list[Line]:
    """Return the lines that a run executes in this thread, in order, including repetitions."""
    lines: list[Line] = []
    sys.settrace(trace(lambda frame: lines.append((frame.f_code.co_filename, frame.f_lineno)), files))
    try:
        run()
    finally:
        sys.settrace(None)
    return lines


@contextlib.contextmanager
def interrupt_at(
    number: int, kind: type[BaseException] = KeyboardInterrupt, files: tuple[str, ...] = FILES
) -> Iterator[list[tuple[str, int, float]]]:
    """Raise at a line of the block, by its index in `list_lines`; yields a list that receives the place and the time.

    Dropped is raised at the line, or at the first line after it at which fxsplit listens for it.
    """
    left = [number]
    where: list[tuple[str, int, float]] = []

    def visit(frame: FrameType) -> None:
        left[0] -= 1
        if left[0] >= 0 or where:
            return
        if kind is Dropped and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return
        where.append((frame.f_code.co_filename, frame.f_lineno, time.monotonic()))
        if kind is Dropped:
            Finalised()
        elif kind is KeyboardInterrupt:
            # A real signal, because fxsplit notices it even if torch drops the exception.
            signal.raise_signal(signal.SIGINT)
        else:
            raise kind

    # Test processes may lack this handler, and print dropped exceptions.
    before = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    sys.unraisablehook = lambda dropped: None
    sys.settrace(trace(visit, files))
    try:
        yield where
    finally:
        sys.settrace(None)
        # Any other handler at this point is a fault that the test must find.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, before[0])
        sys.unraisablehook = before[1]
