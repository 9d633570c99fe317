"""Write files whole or not at all: an existing file stays until the new contents are complete."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from fxsplit.errors import FileError, suggest

BEING_WRITTEN = ".fxsplit-"
"""The prefix of the names of incomplete files."""
NEXT_STEPS = {
    errno.ENOENT: "make its folder first",
    errno.ENOTDIR: "a part of the path is a file: give a folder",
    errno.EISDIR: "it is a folder: give the name of a file",
    errno.EACCES: "give a path that you may write to",
    errno.EPERM: "give a path that you may write to",
    errno.EROFS: "give a path that you may write to",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "make room",
}
"""The next step for an error of the operating system, by its number."""


def explain_unreadable(error: Exception) -> str:
    """Return the reason why a file could not be read or parsed, in words that can follow "cannot read ...: "."""
    # Python's own message is about its stack, not the file.
    return "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}{_suggest_file(error)}"


def _suggest_file(error: Exception) -> str:
    """Return `; did you mean 'net.json'?` for a missing file if its folder has a similar name, and "" otherwise."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, (str, bytes)):
        return ""
    folder, name = os.path.split(os.fsdecode(error.filename))
    try:
        return suggest(name, os.listdir(folder or os.curdir))
    except OSError:
        return ""


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` to a file. If that fails, the file stays unchanged. Text is written as UTF-8.

    Follows links and keeps the permissions of an existing file. Pipes, terminals and devices are written directly.
    Raises FileError, which is also an OSError, with the path and the next step.
    """
    try:
        _write(os.fspath(path), content.encode() if isinstance(content, str) else content)
    # A path with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise explain_unwritable(f"cannot write {os.fspath(path)!r}", error) from error


def check_can_write(path: str | os.PathLike[str]) -> None:
    """Raise the FileError of `write_whole`, before long work, for a file that cannot be written. Nothing is changed."""
    name = os.fspath(path)
    try:
        if _is_stream(name):
            return
        target = os.path.realpath(name)
        with suppress(FileNotFoundError):
            os.lstat(target)
            with open(target, "ab"):
                pass
        with tempfile.TemporaryFile(dir=os.path.dirname(target)):
            pass
    except (OSError, ValueError) as error:
        raise explain_unwritable(f"cannot write {name!r}", error) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its parents, unless they exist. Raises FileError with the path and the next step."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise FileError(
            f"cannot make the folder {os.fspath(path)!r}: a file has that name; give another path"
        ) from error
    except (OSError, ValueError) as error:
        raise explain_unwritable(f"cannot make the folder {os.fspath(path)!r}", error) from error


def _write(path: str, content: bytes) -> None:
    """Write a file whole or not at all, or write to a stream. Raises OSError or ValueError."""
    if _is_stream(path):
        with open(path, "wb") as stream:
            stream.write(content)
        return
    target = os.path.realpath(path)
    mode = None
    if os.path.lexists(target):
        mode = stat.S_IMODE(os.stat(target).st_mode)
        # os.replace checks only the folder's permissions. Check the file's own as well.
        with open(target, "ab"):
            pass
    # Use the same folder, since moving to another disk is not atomic. Use a short name, since `path` may have the
    # longest possible one.
    temporary = os.path.join(os.path.dirname(target), f"{BEING_WRITTEN}{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.write(content)
            file.flush()
            # Without fsync, a crash could leave the new name without contents.
            os.fsync(file.fileno())
        os.replace(temporary, target)
    # Clean up after KeyboardInterrupt too.
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _is_stream(path: str) -> bool:
    """Return whether a path is not a file in a folder, but a pipe, a device or an open file of a process."""
    # /dev/stdout leads to /proc, even if the shell redirects it to a file, which must not be replaced.
    aim = os.readlink(path) if os.path.islink(path) else path
    if os.path.realpath(os.path.dirname(aim)).startswith("/proc/"):
        return True
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def explain_unwritable(what: str, error: OSError | ValueError) -> FileError:
    """Return a FileError that says which action failed (`what`), why, and what to do next."""
    number = error.errno if isinstance(error, OSError) else None
    reason = getattr(error, "strerror", None) or str(error)
    step = NEXT_STEPS.get(number or 0, "give another path")
    found = FileError(f"{what} ({reason}): {step}; nothing was changed there")
    found.errno = number
    return found
