"""Output of commands: tables and JSON, to a closed pipe, to a full disk, in any encoding."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from fxsplit.errors import FileError
from fxsplit.system.figures import replace_infinite
from fxsplit.system.shown import WIDTH, Parts, render

LEAST = 40
"""The least width of a table in characters. Narrower tables are unreadable."""


class _Output:
    """Standard output that raises FileError on failure, and prints `?` for characters that its encoding lacks."""

    def __init__(self, stream: TextIO) -> None:
        self.failed: FileError | BrokenPipeError | None = None
        self._stream = stream

    def write(self, text: str) -> int:
        """Write some text."""
        with self._explained():
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                return self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def flush(self) -> None:
        """Flush the buffer."""
        with self._explained():
            self._stream.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an error of the operating system into a FileError, but leave a closed pipe. Remember it in `failed`."""
        try:
            yield
        except BrokenPipeError as error:
            self.failed = error
            raise
        except OSError as error:
            self.failed = FileError(
                f"cannot write to standard output ({error.strerror or error}): make room, or send the output elsewhere"
            )
            raise self.failed from error

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream, such as `isatty`."""
        return getattr(self._stream, name)


@contextmanager
def guard_output() -> Iterator[None]:
    """Let printing in the block raise FileError on failure, or BrokenPipeError; flush at the end.

    After either error the buffer is discarded, so that Python does not try to print it again at exit.
    """
    stream = sys.stdout
    # A program without a terminal, such as `pythonw`, has no stdout.
    if stream is None:
        yield
        return
    output = _Output(stream)
    try:
        with redirect_stdout(cast(TextIO, output)):
            try:
                yield
            finally:
                # Do not flush after a failure. Raise a closed pipe again, since rich takes it for a normal end.
                if isinstance(output.failed, BrokenPipeError):
                    raise output.failed
                if output.failed is None:
                    output.flush()
    finally:
        if output.failed is not None:
            _drop_rest(stream)


def print_error(text: str) -> None:
    """Print a line on standard error, if possible."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_parts(parts: Parts) -> None:
    """Print tables and lines in the terminal's width, or in the default width elsewhere."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    print(render(parts, max(width, LEAST)))


def print_json(data: Any) -> None:
    """Print one JSON object."""
    sys.stdout.write(to_json(data))


def to_json(data: Any) -> str:
    """Return one JSON object as a line. Infinity and NaN become null, since JSON lacks them."""
    return json.dumps(replace_infinite(data), allow_nan=False) + "\n"


def _drop_rest(stream: TextIO) -> None:
    """Discard the stream's buffer."""
    try:
        stream.flush()
    except OSError:
        # A Python stream without a file, such as StringIO, has no file number.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
