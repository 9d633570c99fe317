"""Leave the inner frames of fxsplit and of libraries out of the tracebacks of errors that leave a public function.

    user's line > compile > 14 inner frames > _run_pass > the user's pass > the line that fails
    user's line > compile >                   _run_pass > the user's pass > the line that fails

FXSPLIT_TRACEBACK=full in the environment leaves tracebacks as they are.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from inspect import unwrap
from types import CodeType, FunctionType, TracebackType
from typing import Any

FULL = "full"
"""The value of FXSPLIT_TRACEBACK that shows all frames."""
LAST, MOST = 3, 12
"""The last frames of a traceback, which are kept whatever they are, and the most frames that are kept."""

OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of this package."""
LIBRARIES = (*(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")), "<frozen ")
"""How the files of Python's own library begin."""


def leave_out_frames(error: BaseException, function: Callable[..., Any]) -> None:
    """Leave frames that tell a user nothing out of the traceback of an error, and of its causes and contexts.

    Kept are the frame of the public `function`, frames of the user's own code and of the models' libraries, the frame
    of fxsplit that called them, and the last ones. An error that is not of fxsplit gets a note on how to see all.
    """
    if os.environ.get("FXSPLIT_TRACEBACK") == FULL:
        return
    inner = unwrap(function)
    code = inner.__code__ if isinstance(inner, FunctionType) else None
    # A list first: the chain of an error changes if code below raises.
    left_out = sum([_shorten(each, code) for each in list(_follow(error))])
    if left_out and isinstance(error, Exception) and not type(error).__module__.startswith("fxsplit"):
        note = f"{left_out} frames are left out: FXSPLIT_TRACEBACK={FULL} in the environment shows them"
        # A public function may have called another one.
        error.__notes__ = [*(n for n in getattr(error, "__notes__", ()) if not n.endswith(note[-40:])), note]


def _follow(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and all errors that it is printed with, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [other for other in (each.__cause__, each.__context__) if other is not None]


def _shorten(error: BaseException, public: CodeType | None) -> int:
    """Leave frames out of the traceback of one error, and return their number."""
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    # The frames above the public function are its decorators.
    begin = next((i for i, each in enumerate(entries) if each.tb_frame.f_code is public), 0)
    above, entries = entries[:begin], entries[begin:]
    telling = [not _is_inner(each) for each in entries]
    kept = {
        i
        for i, each in enumerate(entries)
        if telling[i] or each.tb_frame.f_code is public or (i + 1 < len(entries) and telling[i + 1] and _is_own(each))
    }
    last = set(range(max(len(entries) - LAST, 0), len(entries)))
    first = sorted(kept - last)
    # The first is the public function; of the others, the last are nearest to the fault.
    chosen = sorted({*first[:1], *first[len(first) - (MOST - LAST - 1) :]} if len(first) > MOST - LAST else {*first})
    shown = [entries[i] for i in (*chosen, *sorted(last))]
    below: TracebackType | None = None
    for each in reversed(shown):
        below = TracebackType(below, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = below
    return len(above) + len(entries) - len(shown)


def _is_own(entry: TracebackType) -> bool:
    """Return whether a frame is one of fxsplit."""
    return entry.tb_frame.f_code.co_filename.startswith(OWN)


def _is_inner(entry: TracebackType) -> bool:
    """Return whether a frame is one of fxsplit, torch or Python's library."""
    file = entry.tb_frame.f_code.co_filename
    # Python's library may hold the folder of all others.
    if os.path.join("", "site-packages", "") in file:
        torch = sys.modules.get("torch")
        return torch is not None and file.startswith(os.path.join(os.path.dirname(str(torch.__file__)), ""))
    return file.startswith((OWN, *LIBRARIES))
