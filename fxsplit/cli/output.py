"""What commands print: to a program that has stopped reading, to a full disk, in any encoding; and as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from math import isfinite
from typing import Any, TextIO, cast

from fxsplit.errors import FileError
from fxsplit.system.shown import WIDTH, Parts, render

LEAST = 40
"""In fewer columns no table can be read."""


class _Output:
    """Standard output whose failures are FileErrors, and that prints `?` for what its encoding lacks."""

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
        """Write what was kept back."""
        with self._explained():
            self._stream.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise FileError for an error of the operating system, but for that of a reader who has gone; note either."""
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
        """Return what else the stream has, such as `isatty`."""
        return getattr(self._stream, name)


@contextmanager
def guard_output() -> Iterator[None]:
    """Let printing inside the block, which is over at its end, raise FileError where it fails, or BrokenPipeError.

    After either the program can end without a further word: Python would try to print the rest once more.
    """
    stream = sys.stdout
    # There is none in a program without a terminal, such as `pythonw`.
    if stream is None:
        yield
        return
    output = _Output(stream)
    try:
        with redirect_stdout(cast(TextIO, output)):
            try:
                yield
            finally:
                # What has failed would fail again, and was told of; but rich takes a reader that has gone for an end.
                if isinstance(output.failed, BrokenPipeError):
                    raise output.failed
                if output.failed is None:
                    output.flush()
    finally:
        if output.failed is not None:
            _drop_rest(stream)


def print_error(text: str) -> None:
    """Print a line on standard error, where that is possible."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_parts(parts: Parts) -> None:
    """Print tables and lines, as wide as the terminal, or as wide as text is elsewhere."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    print(render(parts, max(width, LEAST)))


def print_json(data: Any) -> None:
    """Print one object as JSON; a number that is infinite or none at all is null, as JSON has no word for it."""
    print(json.dumps(_replace_infinite(data), allow_nan=False))


def _drop_rest(stream: TextIO) -> None:
    """Send what a stream has kept back to nowhere."""
    try:
        stream.flush()
    except OSError:
        # A stream of Python's own, such as a StringIO, has no number.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_infinite(data: Any) -> Any:
    """Return the same data with None in place of each float that is not finite."""
    if isinstance(data, dict):
        return {key: _replace_infinite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_replace_infinite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data
