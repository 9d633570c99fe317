"""Leave the inner frames of fxsplit and of libraries out of the tracebacks of errors that leave a public function.

    user's line > compile > 14 inner frames > _run_pass > the user's pass > the line that fails
    user's line > compile >                   _run_pass > the user's pass > the line that fails

FXSPLIT_TRACEBACK=full in the environment leaves tracebacks as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from inspect import unwrap
from types import CodeType, FunctionType, TracebackType
from typing import Any

from fxsplit.system.user_lines import FXSPLIT, is_users

FULL = "full"
"""The value of FXSPLIT_TRACEBACK that shows all frames."""
HINT = f"frames are left out: FXSPLIT_TRACEBACK={FULL} in the environment shows them"
"""The end of the note on an error."""
LAST, MOST = 3, 12
"""How many frames at the end of a traceback are always kept, and the most frames that are kept in all."""


def leave_out_frames(error: BaseException, function: Callable[..., Any]) -> None:
    """Take frames that say nothing to a user out of the traceback of an error, and of its causes and contexts.

    These frames stay: the frame of the public `function`, frames of the user's own code and of the models' libraries,
    the frames of fxsplit that called them, and the last ones. An error that is not fxsplit's own gets a note on how to
    see all frames.
    """
    if os.environ.get("FXSPLIT_TRACEBACK") == FULL:
        return
    inner = unwrap(function)
    code = inner.__code__ if isinstance(inner, FunctionType) else None
    # A list first: the chain of an error changes if code below raises.
    left_out = sum([_shorten(each, code) for each in list(_follow(error))])
    if left_out and isinstance(error, Exception) and not type(error).__module__.startswith("fxsplit"):
        # A public function may have called another one.
        notes = [note for note in getattr(error, "__notes__", ()) if not note.endswith(HINT)]
        error.__notes__ = [*notes, f"{left_out} {HINT}"]


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
    """Take frames out of the traceback of one error, and return how many. `public`: the code of the public function."""
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    count = len(entries)
    # The frames above the public function are its decorators.
    begin = next((i for i, each in enumerate(entries) if each.tb_frame.f_code is public), None)
    entries = entries[begin or 0 :]
    telling = [*map(_is_telling, entries)]
    last = max(len(entries) - LAST, 0)
    # The public function, the user's frames, and the frames of fxsplit that called them.
    kept = [0] if last and begin is not None else []
    kept += [i for i in range(len(kept), last) if telling[i] or (telling[i + 1] and _is_own(entries[i]))]
    # Of many, the nearest to the fault.
    if len(kept) > MOST - LAST:
        kept = [kept[0], *kept[1 - MOST + LAST :]]
    below: TracebackType | None = None
    for i in reversed((*kept, *range(last, len(entries)))):
        below = TracebackType(below, entries[i].tb_frame, entries[i].tb_lasti, entries[i].tb_lineno)
    error.__traceback__ = below
    return count - len(kept) - len(entries) + last


def _is_own(entry: TracebackType) -> bool:
    """Return whether a frame is one of fxsplit."""
    return entry.tb_frame.f_code.co_filename.startswith(FXSPLIT)


def _is_telling(entry: TracebackType) -> bool:
    """Return whether a frame is the user's, or of the code of a graph."""
    file = entry.tb_frame.f_code.co_filename
    return is_users(file) or file.startswith("<eval_with_key>")
