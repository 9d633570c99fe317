"""Findings: the results of a command's part so far, printed, and kept in a file that is always whole."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One finding: its topic `what`, and its values by name, with their units."""


@dataclass
class Findings:
    """Rows, in the order in which they were found; after each row, a file has all of them.

    `until` is the end of the part's time, by `time.monotonic()`: a part that runs out of time leaves the rest out, and
    says so. `failed` is the number of failed checks, None before the end.
    """

    path: Path | None = None
    until: float = float("inf")
    rows: list[Row] = field(default_factory=list)
    failed: int | None = None

    def note(self, what: str, **values: Any) -> None:
        """Add a row, print it and write all rows."""
        self.rows.append({"what": what, **values})
        print(f"{what}: {', '.join(f'{name} {show(value)}' for name, value in values.items())}", flush=True)
        self._write()

    def finish(self, failed: int) -> int:
        """Note that the part has ended, and how many of its checks failed; return their number."""
        self.failed = failed
        self._write()
        return failed

    def seconds_left(self) -> float:
        """Return how long the part may still take."""
        return self.until - time.monotonic()

    def _write(self) -> None:
        """Write the file, if there is a path."""
        if self.path is not None:
            write_whole(self.path, json.dumps({"failed": self.failed, "rows": self.rows}, indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader may open it at any time, and the writer may be killed."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def show(value: Any) -> str:
    """Return a value as a table shows it: floats with as many digits as are meaningful."""
    if isinstance(value, float):
        return f"{value:.1e}" if value and abs(value) < 1e-2 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
