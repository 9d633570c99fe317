"""Folders of checkpoints: `step-7` and so on, each complete or not there.

A checkpoint is written under another name and moved to its own when all of it is on the disk. It consists of

    checkpoint.json                  what follows: the step, the options of the optimizer, names of tied weights
    model.safetensors                weights by the names of the model's state_dict, as Hugging Face reads them; of
                                     several ranks model-00001-of-00002.safetensors and so on, with their index
    training-00001-of-00002.safetensors   what the optimizer keeps of each weight, and the state of random numbers
    plan.json, costs.json            the plan, and the profile that it was made of

All of it is data: nothing in it is pickled.

Several threads and processes may save to one folder. Whoever changes the names in it holds a lock on the folder
meanwhile, and whoever writes a checkpoint holds a lock on that checkpoint. What nobody has locked was left by a writer
that is gone.
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
"""Names of folders that are being written, and of old checkpoints on their way out (-old)."""
FOLDER_LOCK, WRITER_LOCK = f"{BEING_WRITTEN}lock", "writing.lock"
"""The file by which a folder of checkpoints is locked, and the one by which a checkpoint is that is being written."""
LOCK_LIMIT_S = 600.0
"""How long a thread waits for the lock of a folder: others hold it while they move and remove checkpoints."""


@dataclass(frozen=True)
class Group:
    """A group of an optimizer: the names of its parameters, and its options, as JSON has them."""

    parameters: list[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, except its tensors.

    step: the user's number. files: names of the safetensors files. tied: a tied weight is stored under one of its
    names; this maps its other names to that name. optimizer: the name of its class, or None without one. extra,
    extra_notes: the user's extra=, as `typed_json` encodes it. gradient_hook: the hook that added gradients over ranks,
    if it keeps state from step to step. training: dtype and shape of every tensor beside the weights, by name; older
    checkpoints have None.
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
        """Return it as JSON."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    def make_extra(self) -> dict[Any, Any]:
        """Return the user's own as it was given; raises ValueError for what is no dict."""
        found = decode(self.extra, self.extra_notes)
        if not isinstance(found, dict):
            raise ValueError(f"extra is {show(found)}, which is no dict")
        return found


def identify(folder: Path) -> tuple[int, int] | None:
    """Return the number and the time of a checkpoint's manifest, which tell it from its successor; None without one."""
    try:
        found = os.stat(folder / MANIFEST)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint says of itself; raises InputError for a folder that is no complete checkpoint."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT or data.pop("version") != VERSION:
            raise InputError(f"{str(path)!r} is of another format or version: read it with the fxsplit that wrote it")
        data["groups"] = [Group(**group) for group in data["groups"]]
        manifest = Manifest(**data)
        _check_manifest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} cannot be read as a checkpoint: {explain_unreadable(error)}") from error
    # A name with a folder in it could lead anywhere, and a checkpoint may come from others.
    for name in manifest.files:
        if os.path.basename(name) != name or not (folder / name).is_file():
            raise InputError(
                f"{str(path)!r} names {show(name)}, which is no file beside it: is the checkpoint complete?"
            )
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise ValueError unless everything in it is of its type."""
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
        raise ValueError("a value is of another type than it should be")
    manifest.make_extra()


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_dict_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest last; none for a folder that is not there."""
    try:
        found = [(int(m[1]), path) for path in Path(folder).iterdir() if (m := STEP.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"{os.fspath(folder)!r} is no folder of checkpoints: {error}") from error
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def put_back(folder: str | os.PathLike[str]) -> None:
    """Put old checkpoints back if their writers were killed while they replaced them, and this process may do so."""
    try:
        found = [LEFT_OVER.fullmatch(name) for name in os.listdir(folder)]
    except OSError:  # whoever lists the checkpoints says why
        return
    if any(m and m[2] and not os.path.lexists(Path(folder, m[1])) for m in found):
        # Who replaces one just now has the lock.
        with suppress(FileError), _hold_folder(Path(folder)):
            _clear_left_over(Path(folder))


class NewCheckpoint:
    """A checkpoint that is being written; it is in its place, whole, after `complete`.

    token: what tells it from others that are being written; all ranks that write it have the same.
    """

    def __init__(self, folder: Path, step: int, token: str) -> None:
        self.path = folder / f"step-{step}"
        self.beside = folder / f"{BEING_WRITTEN}step-{step}-{token}"
        # Any thread may let go of it.
        self._lock = FileLock(self.beside / WRITER_LOCK, thread_local=False)

    def begin(self) -> None:
        """Make the folder to write in, and lock it; one rank does this before all ranks write. Raises FileError."""
        make_folder(self.path.parent)
        with _hold_folder(self.path.parent):
            make_folder(self.beside)
            try:
                self._lock.acquire(timeout=LOCK_LIMIT_S)
            except OSError as error:
                raise explain_unwritable(f"cannot lock {str(self.beside)!r}", error) from error

    def join(self) -> None:
        """Make the folder on this host, unless it is there; raises FileError."""
        make_folder(self.beside)

    def check_place(self) -> None:
        """Raise FileError unless nothing is at the place of the checkpoint, or one that it replaces."""
        if not os.path.lexists(self.path) or _is_checkpoint(self.path):
            return
        with suppress(OSError):
            if not any(self.path.iterdir()):
                return
        raise FileError(
            f"{str(self.path)!r} is there already, and is no checkpoint that can be read: move it away, or give "
            "another folder or step; nothing was changed there"
        )

    def complete(self, manifest: Manifest, keep: int | None) -> None:
        """Write the manifest, and move everything to its place; raises FileError.

        Afterwards leftovers of other writers are removed, and older checkpoints, so that `keep` of them stay.
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
        """Move the folder to its place, whole; what stands there is removed."""
        # A folder with contents is not replaced in one step. A writer that is gone between leaves the one before.
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
        """Note when this is saved, later than all that are there, whatever their clocks said."""
        others = [_get_time(path) for path in list_checkpoints(self.path.parent)]
        now = max([time.time_ns(), *(other + 1 for other in others)])
        os.utime(self.beside / MANIFEST, ns=(now, now))

    def _let_go(self) -> None:
        """Let go of the lock, whose file is no part of the checkpoint."""
        self._lock.release()
        (self.beside / WRITER_LOCK).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove what has been written."""
        self._lock.release()
        shutil.rmtree(self.beside, ignore_errors=True)


def make_token() -> str:
    """Return a new token for a checkpoint that is to be written."""
    return secrets.token_hex(8)


@contextmanager
def _hold_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder for the block, after waiting for other threads and processes; raises FileError."""
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
        # Before it is let go of: whoever waits for it then notices that the file is gone, and makes another one.
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def _is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest of this format; other tools may have files of the same name."""
    try:
        return bool(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _clear_left_over(folder: Path) -> None:
    """Remove leftovers of writers that are gone, or put them back. The caller holds the folder's lock."""
    for path in sorted(folder.iterdir()):
        found = LEFT_OVER.fullmatch(path.name)
        if found is None or not path.is_dir():
            continue
        if not found[2]:
            if not _is_being_written(path):
                shutil.rmtree(path, ignore_errors=True)
        # A writer holds the folder's lock while it replaces a checkpoint. This thread has that lock now, so the writer
        # is gone. Without a checkpoint at its place, the old one is the only one: it goes back.
        elif _is_checkpoint(path) and not os.path.lexists(folder / found[1]):
            with suppress(OSError):
                os.rename(path, folder / found[1])
        else:
            _remove_moved(path)


def _is_being_written(path: Path) -> bool:
    """Return whether a thread or process has a lock on a checkpoint."""
    lock = FileLock(path / WRITER_LOCK)
    try:
        lock.acquire(timeout=0)
    # It is locked, or this process may not lock it: leave it alone.
    except OSError:
        return True
    lock.release()
    return False


def _remove_older(new: Path, keep: int) -> None:
    """Remove all but `keep` checkpoints of a folder: the new one stays, and so do those that were saved last before."""
    # By their times and not their steps: a new run counts from 0 again, and may share the folder of an earlier run.
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
    """Return when a checkpoint was saved, in nanoseconds."""
    return (path / MANIFEST).stat().st_mtime_ns


def _remove_moved(path: Path) -> None:
    """Remove a checkpoint that was moved out of its place."""
    if path.is_symlink():  # what it leads to is elsewhere, and the user's
        path.unlink(missing_ok=True)
        return
    # Without its manifest nobody puts it back.
    with suppress(OSError):
        (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _flush_folder(path: Path) -> None:
    """Let the names in a folder reach the disk, where the system can do so."""
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
