"""Files are written whole or not at all: what stood at a path before is there until the new contents are complete."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from fxsplit.errors import FileError

BEING_WRITTEN = ".fxsplit-"
"""How the names of files begin that are not whole yet."""
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
"""What to do about an error of the operating system, by its number."""


def explain_unreadable(error: Exception) -> str:
    """Return in words why a file could not be read or parsed, after "cannot read ...: "."""
    # Python tells of its own stack, and not of the file.
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that it holds all of `content`, or is as it was before; text is written as UTF-8.

    A link is followed, and a file that is replaced keeps its permissions. Pipes, terminals and devices are written to
    directly. Raises FileError, which is an OSError too, naming the path and the next step.
    """
    try:
        _write(os.fspath(path), content.encode() if isinstance(content, str) else content)
    # A path with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        raise explain_unwritable(f"cannot write {os.fspath(path)!r}", error) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, with those around it, unless it is there; raises FileError naming the path and the next step."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise FileError(
            f"cannot make the folder {os.fspath(path)!r}: a file has that name; give another path"
        ) from error
    except (OSError, ValueError) as error:
        raise explain_unwritable(f"cannot make the folder {os.fspath(path)!r}", error) from error


def _write(path: str, content: bytes) -> None:
    """Write a file whole or not at all, or to a stream; raises OSError or ValueError."""
    if _is_stream(path):
        with open(path, "wb") as stream:
            stream.write(content)
        return
    target = os.path.realpath(path)
    mode = None
    if os.path.lexists(target):
        mode = stat.S_IMODE(os.stat(target).st_mode)
        # The folder alone decides whether a file can be replaced. Ask what the file itself allows.
        with open(target, "ab"):
            pass
    # In the same folder, as a file cannot be moved to another disk in one step. The name is short: `path` may have the
    # longest name that there is.
    temporary = os.path.join(os.path.dirname(target), f"{BEING_WRITTEN}{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.write(content)
            file.flush()
            # Without this a computer that stops could be left with the new name and none of the contents.
            os.fsync(file.fileno())
        os.replace(temporary, target)
    # Also a KeyboardInterrupt leaves nothing behind.
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _is_stream(path: str) -> bool:
    """Return whether a path names no file of a folder, but a pipe, a device or what a process has open."""
    # /dev/stdout leads to /proc, also where the shell has sent it to a file, which must not be replaced then.
    aim = os.readlink(path) if os.path.islink(path) else path
    if os.path.realpath(os.path.dirname(aim)).startswith("/proc/"):
        return True
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def explain_unwritable(what: str, error: OSError | ValueError) -> FileError:
    """Return the error that says what could not be done, why, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    reason = getattr(error, "strerror", None) or str(error)
    step = NEXT_STEPS.get(number or 0, "give another path")
    found = FileError(f"{what} ({reason}): {step}; nothing was changed there")
    found.errno = number
    return found
