"""Watching a chain run: dump every IR to a folder, print some, show progress that takes long."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from fxsplit.errors import ChainError, InputError
from fxsplit.ir.graph import IR
from fxsplit.ir.progress import listen
from fxsplit.ir.text import render

PATIENCE_S = 1.0
"""Work that is over sooner shows no progress bar."""


@dataclass
class DumpTo:
    """Writes `00-trace.txt` before the first pass and `NN-name.txt` after each."""

    folder: Path
    _count: int = field(default=0, init=False)

    def start(self, ir: IR) -> None:
        """Write the IR as it was traced."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot dump into {str(self.folder)!r}: {error}; give a folder that can be made"
            ) from error
        self._count = 0
        self._write("trace", ir)

    def after(self, name: str, ir: IR) -> None:
        """Write the IR after a pass."""
        self._write(name, ir)

    def _write(self, name: str, ir: IR) -> None:
        """Write one numbered file."""
        (self.folder / f"{self._count:02d}-{name}.txt").write_text(render(ir), encoding="utf-8")
        self._count += 1


@dataclass(frozen=True)
class PrintAfter:
    """Prints the IR after the passes in `names`, or after each when that is ("all",)."""

    names: tuple[str, ...]
    file: TextIO | None = None

    def start(self, ir: IR) -> None:
        """Print the traced IR where "trace" or "all" is asked for."""
        self.after("trace", ir)

    def after(self, name: str, ir: IR) -> None:
        """Print the IR if its pass is asked for."""
        if name in self.names or "all" in self.names:
            print(f"# after {name}\n{render(ir)}", file=self.file or sys.stdout)


def make_observers(dump: str | os.PathLike[str] | None, passes: Sequence[str]) -> list[DumpTo | PrintAfter]:
    """Return the observers asked for by `dump=`, FXSPLIT_DUMP and FXSPLIT_PRINT_AFTER.

    Raises ChainError when a name in FXSPLIT_PRINT_AFTER is none of `passes`.
    """
    observers: list[DumpTo | PrintAfter] = []
    folder = dump or os.environ.get("FXSPLIT_DUMP")
    if folder:
        observers.append(DumpTo(Path(folder)))
    names = tuple(filter(None, (n.strip() for n in os.environ.get("FXSPLIT_PRINT_AFTER", "").split(","))))
    for name in names:
        if name not in ("all", "trace", *passes):
            raise ChainError(f"FXSPLIT_PRINT_AFTER names {name!r}: known are all, trace, {', '.join(passes)}")
    if names:
        observers.append(PrintAfter(names))
    return observers


@contextmanager
def show_progress() -> Iterator[None]:
    """Show a bar on standard error for tracked work that takes over a second, where that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    bar = Progress(console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}
    begin = time.monotonic()

    def listener(what: str, done: int, total: int) -> None:
        if time.monotonic() - begin < PATIENCE_S:
            return
        if not tasks:
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    try:
        with listen(listener):
            yield
    finally:
        bar.stop()
