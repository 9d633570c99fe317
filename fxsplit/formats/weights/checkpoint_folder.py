"""Checkpoint folders `step-7` and so on, each either complete or absent.

A checkpoint is written under a temporary name, and renamed once all its files are on disk:

    folder/
      step-7/
        checkpoint.json         step, optimizer options, names of tied weights
        model.safetensors       weights by the names of the model's state_dict, as Hugging Face reads them;
                                several ranks write model-00001-of-00002.safetensors and so on, with an index
        training-00001-of-00002.safetensors     optimizer state of each weight, and states of random generators
        plan.json, costs.json   the plan, and the profile it was made from
      .fxsplit-step-8-TOKEN       a checkpoint being written, with a lock file
      .fxsplit-step-7-TOKEN-old   an old checkpoint being replaced

All of it is data: there is no pickle in it.

Several threads and processes may save to one folder. A process that changes names in the folder holds the folder's lock
meanwhile; a process that writes a checkpoint holds that checkpoint's lock. An unlocked temporary folder is left over
from a writer that has died.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fxsplit.errors import FileError, InputError
from fxsplit.formats.weights.typed_json import Notes, decode
from fxsplit.system.figures import is_count, show
from fxsplit.system.files import BEING_WRITTEN, explain_unreadable, explain_unwritable, make_folder, write_whole

MANIFEST, PLAN, COSTS = "checkpoint.json", "plan.json", "costs.json"
FORMAT, VERSION = "fxsplit checkpoint", 1
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
LEFT_OVER = re.compile(re.escape(BEING_WRITTEN) + r"(step-[0-9]+)-[0-9a-f]+(-old)?")
"""Temporary folders: checkpoints being written, and old checkpoints being removed (-old)."""
FOLDER_LOCK, WRITER_LOCK = f"{BEING_WRITTEN}lock", "writing.lock"
"""The lock file of a folder of checkpoints, and the lock file of a checkpoint being written."""
LOCK_LIMIT_S = 600.0
"""The longest wait for a folder's lock, which other writers hold while they move and remove checkpoints."""


@dataclass(frozen=True)
class Group:
    """A parameter group of an optimizer: the names of its parameters, and its options in JSON types."""

    parameters: list[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, except its tensors.

    - step: the user's step number
    - files: names of the safetensors files
    - tied: each other name of a tied weight -> the name under which the weight is stored
    - optimizer: the name of the optimizer's class, or None
    - extra, extra_notes: the user's extra=, as encoded by `typed_json`
    - gradient_hook: the hook that reduced gradients over ranks, if it keeps state from step to step
    - training: dtype and shape by name of every tensor that is not a weight; None in older checkpoints
    """

    step: int
    files: list[str]
    tied: dict[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    groups: list[Group] = field(default_factory=list)
    extra: Any = field(default_factory=dict)
    extra_notes: Notes = field(default_factory=list)
    gradient_hook: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    training: dict[str, str] | None = None

    def to_text(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    def make_extra(self) -> dict[Any, Any]:
        """Return the user's extra= as it was given. Raises ValueError if it is no dict."""
        found = decode(self.extra, self.extra_notes)
        if not isinstance(found, dict):
            raise ValueError(f"extra is {show(found)}, which is no dict")
        return found


def identify(folder: Path) -> tuple[int, int] | None:
    """Return inode and time of a checkpoint's manifest. They change if the checkpoint is replaced.

    None without a manifest.
    """
    try:
        found = os.stat(folder / MANIFEST)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises InputError for a folder without a complete checkpoint."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        stated = data.pop("format"), data.pop("version")
        if stated != (FORMAT, VERSION):
            raise InputError(
                f"{str(path)!r} is of format {show(stated[0])}, version {show(stated[1])}, and this fxsplit reads "
                f"{FORMAT!r}, version {VERSION}: read it with the fxsplit that wrote it"
            )
        data["groups"] = [Group(**group) for group in data["groups"]]
        manifest = Manifest(**data)
        _check_manifest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} cannot be read as a checkpoint: {explain_unreadable(error)}") from error
    # A checkpoint may be untrusted: a name with a folder in it could lead anywhere.
    for name in manifest.files:
        if os.path.basename(name) != name or not (folder / name).is_file():
            raise InputError(
                f"{str(path)!r} names {show(name)}, which is not a file in that folder: is the checkpoint complete?"
            )
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError unless all values have their types."""
    groups = [(group.parameters, group.options) for group in manifest.groups]
    fine = (
        is_count(manifest.step)
        and _is_list_of_texts(manifest.files)
        and _is_dict_of_texts(manifest.tied)
        and isinstance(manifest.extra_notes, list)
        and isinstance(manifest.optimizer, (str, type(None)))
        and isinstance(manifest.gradient_hook, (str, type(None)))
        and _is_dict_of_texts(manifest.versions)
        and (manifest.training is None or _is_dict_of_texts(manifest.training))
        and all(_is_list_of_texts(names) and isinstance(options, dict) for names, options in groups)
    )
    if not fine:
        raise ValueError("a value has the wrong type")
    manifest.make_extra()


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_dict_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a folder, newest last; none if the folder does not exist.

    A link to another checkpoint of the same folder is left out: it is only a second name.
    """
    try:
        found = [(int(m[1]), path) for path in Path(folder).iterdir() if (m := STEP.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"{os.fspath(folder)!r} is no folder of checkpoints: {error}") from error
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file() and not _is_other_name(path)]


def put_back(folder: str | os.PathLike[str]) -> None:
    """Restore old checkpoints whose writers died while they replaced them, if this process has permission."""
    try:
        found = [LEFT_OVER.fullmatch(name) for name in os.listdir(folder)]
    except OSError:  # list_checkpoints reports the reason
        return
    if any(m and m[2] and not os.path.lexists(Path(folder, m[1])) for m in found):
        # A writer that is replacing one right now holds the lock.
        with suppress(FileError), _hold_folder(Path(folder)):
            _clear_left_over(Path(folder))


class NewCheckpoint:
    """A checkpoint that is being written in a temporary folder. `complete` moves it to its place as a whole.

    token: distinguishes it from other checkpoints being written. All ranks that write it use the same token.
    """

    def __init__(self, folder: Path, step: int, token: str) -> None:
        self.path = folder / f"step-{step}"
        self.beside = folder / f"{BEING_WRITTEN}step-{step}-{token}"
        # Another thread may release the lock.
        self._lock = FileLock(self.beside / WRITER_LOCK, thread_local=False)

    def begin(self) -> None:
        """Create and lock the temporary folder. One rank calls this before any rank writes. Raises FileError."""
        make_folder(self.path.parent)
        with _hold_folder(self.path.parent):
            make_folder(self.beside)
            try:
                self._lock.acquire(timeout=LOCK_LIMIT_S)
            except OSError as error:
                raise explain_unwritable(f"cannot lock {str(self.beside)!r}", error) from error

    def join(self) -> None:
        """Create the temporary folder on this host if it does not exist. Raises FileError."""
        make_folder(self.beside)

    def check_place(self) -> None:
        """Raise FileError unless the place of the checkpoint is free, or holds a checkpoint, which may be replaced."""
        if not os.path.lexists(self.path) or _is_checkpoint(self.path):
            return
        with suppress(OSError):
            if not any(self.path.iterdir()):
                return
        raise FileError(
            f"{str(self.path)!r} exists and is not a readable checkpoint: move it away, or give "
            "another folder or step; nothing was changed there"
        )

    def complete(self, manifest: Manifest, keep: int | None) -> None:
        """Write the manifest and move the checkpoint to its place. Raises FileError.

        Then remove what dead writers left over, and the oldest checkpoints until `keep` remain; None keeps all.
        """
        missing = [name for name in manifest.files if not (self.beside / name).is_file()]
        if missing:
            raise FileError(
                f"{missing[0]!r}, which another rank has written, is not in {str(self.beside)!r} here: give a folder "
                "that all hosts share"
            )
        write_whole(self.beside / MANIFEST, manifest.to_text())
        with _hold_folder(self.path.parent):
            self.check_place()
            try:
                self._let_go()
                self._note_time()
                _flush_folder(self.beside)
                self._take_place()
                _flush_folder(self.path.parent)
            except OSError as error:
                raise explain_unwritable(f"cannot complete {str(self.path)!r}", error) from error
            _clear_left_over(self.path.parent)
            if keep is not None:
                _remove_older(self.path, keep)

    def _take_place(self) -> None:
        """Move the temporary folder to its place, and remove the previous checkpoint."""
        # A non-empty folder cannot be replaced in one step. If the writer dies in between, the old one remains.
        old = self.beside.with_name(self.beside.name + "-old")
        if os.path.lexists(self.path):
            os.rename(self.path, old)
        try:
            os.rename(self.beside, self.path)
        except BaseException:
            if os.path.lexists(old):
                os.rename(old, self.path)
            raise
        if os.path.lexists(old):
            _remove_moved(old)

    def _note_time(self) -> None:
        """Set the manifest's time to now, but later than the time of all other checkpoints, as clocks may disagree."""
        others = [_get_time(path) for path in list_checkpoints(self.path.parent)]
        now = max([time.time_ns(), *(other + 1 for other in others)])
        os.utime(self.beside / MANIFEST, ns=(now, now))

    def _let_go(self) -> None:
        """Release the lock and remove its file, which is no part of the checkpoint."""
        self._lock.release()
        (self.beside / WRITER_LOCK).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove everything written so far."""
        self._lock.release()
        shutil.rmtree(self.beside, ignore_errors=True)


def make_token() -> str:
    """Return a new random token, which distinguishes a checkpoint that is being written from others."""
    return secrets.token_hex(8)


@contextmanager
def _hold_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the block, after waiting for other holders. Raises FileError."""
    lock = FileLock(folder / FOLDER_LOCK)
    try:
        lock.acquire(timeout=LOCK_LIMIT_S)
    except Timeout as error:
        raise FileError(
            f"{lock.lock_file!r} has been locked by another process for {LOCK_LIMIT_S:.0f} s: end that process"
        ) from error
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise explain_unwritable(f"cannot lock the folder {str(folder)!r}", error) from error
    try:
        yield
    finally:
        # Unlink before releasing: a waiting process then notices the missing file and creates a new one.
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest of fxsplit's format. Other tools may use the same file name."""
    try:
        return bool(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _is_other_name(path: Path) -> bool:
    """Return whether a path is a link to a checkpoint in the same folder. The checkpoint itself is listed anyway.

    A link to another folder is not such a second name: nothing else in this folder may lead to that checkpoint.
    """
    target = path.resolve()
    return (
        target.parent == path.parent.resolve() and target.name != path.name and STEP.fullmatch(target.name) is not None
    )


def _clear_left_over(folder: Path) -> None:
    """Remove or restore the folders that dead writers left over. The caller holds the folder's lock."""
    for path in sorted(folder.iterdir()):
        found = LEFT_OVER.fullmatch(path.name)
        if found is None or not path.is_dir():
            continue
        if not found[2]:
            if not _is_being_written(path):
                shutil.rmtree(path, ignore_errors=True)
        # A writer holds the folder's lock while it replaces a checkpoint. This thread holds it now, so the writer is
        # dead. If the checkpoint's place is empty, the old checkpoint is the only copy: restore it.
        elif _is_checkpoint(path) and not os.path.lexists(folder / found[1]):
            with suppress(OSError):
                os.rename(path, folder / found[1])
        else:
            _remove_moved(path)


def _is_being_written(path: Path) -> bool:
    """Return whether another thread or process holds a checkpoint's lock, or the lock cannot be tried."""
    lock = FileLock(path / WRITER_LOCK)
    try:
        lock.acquire(timeout=0)
    # It is locked, or this process has no permission: leave it.
    except OSError:
        return True
    lock.release()
    return False


def _remove_older(new: Path, keep: int) -> None:
    """Remove the oldest checkpoints until `keep` remain. The new checkpoint always stays."""
    # Order by time, not by step: a new run counts from 0 again, and may share the folder with an earlier run.
    others = [path for path in list_checkpoints(new.parent) if path != new]
    others.sort(key=_get_time)
    for path in others[: max(len(others) - keep + 1, 0)]:
        if not _is_checkpoint(path):
            continue
        old = path.with_name(f"{BEING_WRITTEN}{path.name}-{make_token()}-old")
        try:
            os.rename(path, old)
        except OSError as error:
            raise FileError(
                f"{str(new)!r} is saved, and the older {str(path)!r} cannot be removed ({error.strerror}): remove it"
            ) from error
        _remove_moved(old)


def _get_time(path: Path) -> int:
    """Return the time at which a checkpoint was saved, in nanoseconds."""
    return (path / MANIFEST).stat().st_mtime_ns


def _remove_moved(path: Path) -> None:
    """Remove a checkpoint that was moved out of its place."""
    if path.is_symlink():  # its target is elsewhere, and belongs to the user
        path.unlink(missing_ok=True)
        return
    # Remove the manifest first: without it, no process restores the folder.
    with suppress(OSError):
        (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _flush_folder(path: Path) -> None:
    """Flush the names in a folder to disk, if the operating system can."""
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
