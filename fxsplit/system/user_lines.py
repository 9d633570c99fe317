"""Find the user's own lines, as opposed to lines of torch, fxsplit and Python, in tracebacks and for warnings."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from fxsplit.errors import FxsplitWarning

_torch = find_spec("torch")  # planning loads no torch
TORCH = str(Path(_torch.origin).parent) + os.sep if _torch and _torch.origin else "<no torch>"
FXSPLIT = str(Path(__file__).parents[1]) + os.sep
"""The folders of torch and fxsplit. The separator at the end excludes torchvision's files."""
PYTHON = sysconfig.get_path("stdlib") + os.sep
"""The folder of Python's standard library. Modules such as contextlib call fxsplit's code on fxsplit's behalf."""


def is_users(file: str) -> bool:
    """Return whether a file is the user's: not torch's, fxsplit's or Python's, and not `<string>` or the like."""
    # Installed packages lie inside the folder of Python's library, and are not Python's.
    pythons = file.startswith(PYTHON) and "-packages" not in file[len(PYTHON) :]
    return not pythons and not file.startswith((TORCH, FXSPLIT, "<"))


def find_users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of the user's code among some frames, as ` from File "model.py", line 12`; else ""."""
    own = [(frame.f_code.co_filename, line) for frame, line in frames if is_users(frame.f_code.co_filename)]
    return f' from File "{own[-1][0]}", line {own[-1][1]}' if own else ""


def describe_line(file: str, line: int) -> str:
    """Return a line of a file as text: its file, its number and its code."""
    return f"{file}:{line}, {linecache.getline(file, line).strip()!r}"


def warn_user(message: str, category: type[FxsplitWarning] = FxsplitWarning) -> None:
    """Warn at the user's own line: the innermost frame outside of torch, fxsplit and Python's library."""
    # Python 3.12 can skip folders by itself (skip_file_prefixes); Python 3.11 only skips a number of frames.
    here = sys._getframe(1)
    frame = _find_users_frame(here)
    if frame is None:
        # A thread of fxsplit has no line of the user: take the line at which a user's thread waits for it.
        others = (_find_users_frame(other, inside=FXSPLIT) for other in sys._current_frames().values())
        frame = next((found for found in others if found is not None), here)
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    # Without the module's globals: Python would ask its loader for the source, and the loader of a module that
    # `python -m` runs refuses, since the module calls itself __main__. The source is read from the file instead.
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, seen)


def _find_users_frame(frame: FrameType | None, inside: str = "") -> FrameType | None:
    """Return the innermost frame of the user's code, from `frame` outwards; None if there is none.

    If `inside` names a folder, also return None unless a file in this folder runs below that frame.
    """
    entered = False
    while frame is not None and not is_users(frame.f_code.co_filename):
        entered |= frame.f_code.co_filename.startswith(inside)
        frame = frame.f_back
    return frame if entered or not inside else None
