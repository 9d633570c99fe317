"""Folders for dumps: each belongs to one compile, and is marked with a description of its contents.

    ir/chain.json   ir/00-trace.ir    ir/01-profile.ir    ...   the first graph that is compiled
    ir/eval/                                                    the same for the other mode
    ir/train-16x8/                                              the same for another shape (without rows)
    ir/candidates/1F1B-4/                                       the same for a schedule that was only tried ("auto")

`chain.json` marks a folder as one of fxsplit's. Before a new dump, the files of an earlier dump are removed from it. A
folder with other files is refused, and nothing in it is touched.
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
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.scopes.undo import CallerLock

FORMAT = "fxsplit-dump"
MARK = "chain.json"
RUN = "run"
"""The entry of the mark that identifies the run."""
LONGEST = 60
"""The longest text of shapes in the name of a folder. A longer text is replaced by a hash."""

_FILE = re.compile(r"\d\d+-.*\.ir")
# Compiles in several threads may want the same folder at once.
_turn = CallerLock()
# The compile of this process that owns each folder. Folders of earlier processes have no owner.
_owners: dict[str, DumpFolder] = {}


class DumpFolder:
    """The dump folder of one compile: the option `dump=`, else the variable FXSPLIT_DUMP of the environment, else none.

    All compiles of a process share the folder in the environment. The first compile writes to the folder itself, and
    each later compile to a folder inside, named after its model.
    """

    def __init__(self, dump: str | os.PathLike[str] | None) -> None:
        self._asked = dump or os.environ.get("FXSPLIT_DUMP")
        self._shared = not dump
        self._root: Path | None = None
        self._first: tuple[str, Any] | None = None

    def choose(self, model: str, mode: str, shapes: Sequence[Sequence[int]]) -> Path | None:
        """Return the folder for a mode and shapes of `model`; None without a dump, or if another compile owns it.

        Raises FileError if the folder holds files that are not of a dump, or cannot be created.
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
        """Return the folder for this compile, with earlier dumps removed; raises FileError."""
        with _turn.take():
            place, count = root, 1
            while self._shared and os.path.realpath(place) in _owners and place.exists():
                place = root / (model if count == 1 else f"{model}-{count}")
                count += 1
            clear_folder(place, inside=True)
            _owners[os.path.realpath(place)] = self
        return place


def begin_dump(folder: Path, run: str) -> None:
    """Create a folder, remove earlier dumps from it, and mark it with the id of a run.

    Raises FileError like `clear_folder`.
    """
    with _turn.take():
        clear_folder(folder)
        mark_folder(folder, {RUN: run})


def is_of(folder: Path, run: str) -> bool:
    """Return whether the dump in a folder is still of this run. Another compile or process may have replaced it."""
    return (read_mark(folder) or {}).get(RUN) == run


def clear_folder(folder: Path, *, inside: bool = False) -> None:
    """Create a folder, or remove the dump in it. `inside`: remove the dumps in its subfolders too.

    Raises FileError, before anything is removed, if the folder holds files but no mark of a dump, or if a link or a
    folder has the name of a file that a dump may write.
    """
    make_folder(folder)
    # A file that is being written right now belongs to the dump of another thread or process.
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
        # Links may point outside of the folder, and the user's own files in it stay.
        if path.is_symlink():
            continue
        if path.is_file() and _FILE.fullmatch(path.name):
            path.unlink(missing_ok=True)  # another process may be clearing the folder too
        elif inside and path.is_dir() and _is_dump(path):
            clear_folder(path, inside=True)
            if [left.name for left in path.iterdir()] == [MARK]:
                shutil.rmtree(path)
    # The folder stays marked as a dump, but its old description no longer holds.
    mark_folder(folder, {})


def mark_folder(folder: Path, facts: dict[str, Any]) -> None:
    """Mark a folder as a dump, with a description of its contents; raises FileError."""
    write_whole(folder / MARK, json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")


def _is_dump(folder: Path) -> bool:
    """Return whether a folder is marked as a dump of fxsplit."""
    return read_mark(folder) is not None


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the mark of a folder, or None if it is not a dump of fxsplit."""
    path = folder / MARK
    try:
        # Reading a named pipe would wait forever.
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


def _name_shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Return shapes as part of a file name, such as `16x8_3`."""
    text = "_".join("x".join(map(str, shape)) for shape in shapes)
    return text if len(text) <= LONGEST else f"{zlib.crc32(text.encode()):08x}"
