"""Folders that dumps are written to: each is of one compile, is never mixed with another, and says what it is of.

    ir/chain.json   ir/00-trace.txt   ir/01-profile.txt   ...   the first graph that is compiled
    ir/eval/                                                    the same of the other mode
    ir/train-16x8/                                              the same of another shape (without rows)

`chain.json` marks a folder as fxsplit's own. What an earlier run has left in such a folder is removed before a new
dump. A folder with other files is refused, and nothing in it is touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxsplit.errors import FileError
from fxsplit.system.files import BEING_WRITTEN, make_folder, write_whole
from fxsplit.torch_internals.scopes.undo import CallerLock
from fxsplit.torch_internals.user_lines import warn_user

FORMAT = "fxsplit-dump"
MARK = "chain.json"
RUN = "run"
"""The entry of the mark that tells one dump from all others."""
LONGEST = 60
"""A longer text of shapes is no name for a folder."""

_FILE = re.compile(r"\d\d+-.*\.txt")
# Compiles of several threads may want one folder at once.
_turn = CallerLock()
# Which compile of this process each folder is of; folders of earlier processes are nobody's.
_owners: dict[str, DumpFolder] = {}


class DumpFolder:
    """Where one compile dumps to: what `dump=` names, or else FXSPLIT_DUMP in the environment, or nowhere.

    All compiles of a process share what the environment names. The first has the folder itself, and every other one has
    a folder of its own inside, which is called after its model.
    """

    def __init__(self, dump: str | os.PathLike[str] | None) -> None:
        self._asked = dump or os.environ.get("FXSPLIT_DUMP")
        self._shared = not dump
        self._root: Path | None = None
        self._first: tuple[str, Any] | None = None

    def choose(self, model: str, mode: str, shapes: Sequence[Sequence[int]]) -> Path | None:
        """Return the folder for a mode and shapes of `model`; None where nothing is dumped, or another compile owns it.

        Raises FileError for a folder that holds other files than dumps, or that cannot be made.
        """
        if not self._asked:
            return None
        if self._root is None or self._first is None:
            self._root, self._first = self._claim(Path(self._asked), model), (mode, shapes)
            return self._root
        if _owners.get(os.path.realpath(self._root)) is not self:
            warn_user(f"{mode} mode of {model} is not dumped, as {str(self._root)!r} is of a later compile by now")
            return None
        if (mode, shapes) == self._first:
            return self._root
        return self._root / (mode if shapes == self._first[1] else f"{mode}-{_name_shapes(shapes)}")

    def _claim(self, root: Path, model: str) -> Path:
        """Return the folder for this compile, empty of what earlier ones have left; raises FileError."""
        with _turn.take():
            place, count = root, 1
            while self._shared and os.path.realpath(place) in _owners and place.exists():
                place = root / (model if count == 1 else f"{model}-{count}")
                count += 1
            clear_folder(place, inside=True)
            _owners[os.path.realpath(place)] = self
        return place


def begin_dump(folder: Path, run: str) -> None:
    """Make a folder, empty of earlier dumps, and mark it as of a run; raises FileError as `clear_folder` does."""
    with _turn.take():
        clear_folder(folder)
        mark_folder(folder, {RUN: run})


def is_of(folder: Path, run: str) -> bool:
    """Return whether the dump in a folder still is of a run: another compile, or process, may dump there by now."""
    return (_read_mark(folder) or {}).get(RUN) == run


def clear_folder(folder: Path, *, inside: bool = False) -> None:
    """Make a folder, or remove the dump that is in it; with `inside` also the dumps in folders in it.

    Raises FileError, before anything is removed, for a folder that holds files and is not marked as a dump, and for
    what is no file under the name of one that a dump may write.
    """
    make_folder(folder)
    # A file that is being written just now is of another thread's or process's dump.
    held = sorted(path for path in folder.iterdir() if not path.name.startswith(BEING_WRITTEN))
    blocked = next((p for p in held if _FILE.fullmatch(p.name) and (p.is_symlink() or not p.is_file())), None)
    if blocked is not None:
        raise FileError(f"{str(blocked)!r} is no file, and in the way of a dump: remove it, or give another folder")
    if held and not _is_dump(folder):
        raise FileError(
            f"{str(folder)!r} holds files that are of no dump, such as {held[0].name!r}, and is left as it is: give "
            "an empty folder, or a new one"
        )
    for path in held:
        # Links lead elsewhere, and what a user has put here stays.
        if path.is_symlink():
            continue
        if path.is_file() and _FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)  # another process may be clearing the folder too
        elif inside and path.is_dir() and _is_dump(path):
            clear_folder(path, inside=True)
            if [left.name for left in path.iterdir()] == [MARK]:
                shutil.rmtree(path)
    # The folder stays fxsplit's own, and what it was of no longer holds.
    mark_folder(folder, {})


def mark_folder(folder: Path, facts: dict[str, Any]) -> None:
    """Mark a folder as a dump, with what it is of; raises FileError."""
    write_whole(folder / MARK, json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")


def _is_dump(folder: Path) -> bool:
    """Return whether a folder is marked as a dump of fxsplit's."""
    return _read_mark(folder) is not None


def _read_mark(folder: Path) -> dict[str, Any] | None:
    """Return what a folder is marked with, if it is marked as a dump of fxsplit's."""
    path = folder / MARK
    try:
        # A pipe of that name would be waited for.
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def _name_shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Return shapes as a part of a file's name, such as `16x8_3`."""
    text = "_".join("x".join(map(str, shape)) for shape in shapes)
    return text if len(text) <= LONGEST else f"{zlib.crc32(text.encode()):08x}"
