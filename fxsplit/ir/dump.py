"""Observers of a chain: write every IR to a folder, print some of them, and show how far long work has come.

They watch what `manager.run_chain` does, and never change it.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import torch

from fxsplit.errors import FileError
from fxsplit.ir.chain import Chain
from fxsplit.ir.dump_folder import RUN, begin_dump, is_of, mark_folder
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.graph import IR, name_pass
from fxsplit.ir.manager import Observer
from fxsplit.ir.text import render
from fxsplit.system.files import write_whole
from fxsplit.torch_internals.user_lines import warn_user


@dataclass
class DumpTo(Observer):
    """Writes `00-trace.txt` before the first pass, and `01-profile.txt` and so on after each pass.

    An IR in which something does not hold after a pass is written as `04-partition.failed.txt`, below the error.
    `chain.json` says what the dump is of, and how long each pass took. `chain` is the chain as text.
    """

    folder: Path
    chain: str = ""
    _count: int = field(default=0, init=False)
    _run: str = field(default="", init=False, compare=False)

    def start(self, ir: IR) -> None:
        """Write the IR as it was traced, in place of an earlier dump.

        Raises FileError where the folder or the file cannot be made, and for a folder with other files.
        """
        self._run = secrets.token_hex(8)
        begin_dump(self.folder, self._run)
        # Each chain that runs numbers its files from 0, also where one observer watches several.
        self._count = 0
        self.after("trace", ir)

    def after(self, name: str, ir: IR) -> None:
        """Write the IR after a pass, to the file of the next number.

        Only the first file that cannot be written is an error. Of later ones a warning tells: an error would throw away
        what has been measured by then.
        """
        if self._is_lost(ir):
            return
        try:
            self._write(name, render(ir))
            self._mark(ir)
        except FileError as error:
            if self._count == 0:
                raise
            warn_user(f"the dump lacks the IR after pass {name!r}: {error}. The pipeline is compiled all the same")
        self._count += 1

    def failed(self, name: str, ir: IR, error: Exception) -> None:
        """Write an IR that does not hold, below the error that says why."""
        if self._is_lost(ir):
            return
        lines = "".join(f"# {line}\n" for line in f"{type(error).__name__}: {error}".splitlines())
        self._write(f"{name}.failed", lines + render(ir))
        self._mark(ir, failed=f"after {name}: {type(error).__name__}: {error}")

    def _is_lost(self, ir: IR) -> bool:
        """Return whether the folder is of another compile by now, whose files must not mix with these; warn of it."""
        if self._run and not is_of(self.folder, self._run):
            self._run = ""
            warn_user(
                f"the dump of {ir.model} in {str(self.folder)!r} ends here, as another compile dumps there by now, or "
                "the folder has been removed: give each compile a folder of its own"
            )
        return not self._run

    def _mark(self, ir: IR, **more: str) -> None:
        """Write what the dump is of, up to now."""
        example = ir.get(Example)
        told: dict[str, object] = {
            "model": ir.model,
            "mode": ir.mode,
            "shapes": {} if example is None else example.describe(),
        }
        passes = [{"pass": step.text, "seconds": round(step.seconds, 6)} for step in ir.steps]
        versions = {"fxsplit": version("fxsplit"), "torch": torch.__version__}
        told[RUN] = self._run
        mark_folder(self.folder, {**told, "chain": self.chain, "passes": passes, "versions": versions, **more})

    def _write(self, name: str, text: str) -> None:
        """Write the file of the next number."""
        # A pass may be called by any name, and a slash in it would be a folder.
        name = re.sub(r"[^\w.<>-]", "_", name)
        write_whole(self.folder / f"{self._count:02d}-{name}.txt", text)


@dataclass(frozen=True)
class PrintAfter(Observer):
    """Prints the IR after each pass in `names`, or after every pass where `names` has "all"; "trace" is the IR before.

    `file` is where it prints (default: standard output at that time).
    """

    names: tuple[str, ...]
    file: TextIO | None = None

    def start(self, ir: IR) -> None:
        """Print the traced IR where "trace" or "all" is asked for."""
        self.after("trace", ir)

    def after(self, name: str, ir: IR) -> None:
        """Print the IR if its pass is asked for."""
        if name in self.names or "all" in self.names:
            print(f"# after {name}\n{render(ir)}", file=self.file or sys.stdout)

    def failed(self, name: str, ir: IR, error: Exception) -> None:
        """Print an IR that does not hold, if its pass is asked for."""
        if name in self.names or "all" in self.names:
            print(f"# failed after {name}: {error}\n{render(ir)}", file=self.file or sys.stdout)


_unmatched: set[str] = set()


def make_observers(folder: Path | None, chain: Chain) -> list[DumpTo | PrintAfter]:
    """Return an observer that dumps into `folder`, if one is given, and one that prints what FXSPLIT_PRINT_AFTER asks.

    A name there that is no pass of the chain may be one of another pipeline's: of each such name a warning tells once.
    """
    observers: list[DumpTo | PrintAfter] = []
    if folder is not None:
        observers.append(DumpTo(folder, str(chain)))
    passes = [name_pass(step) for step in chain]
    names = tuple(filter(None, (n.strip() for n in os.environ.get("FXSPLIT_PRINT_AFTER", "").split(","))))
    for name in names:
        # A misspelt name would print nothing, and leave its user to wonder.
        if name not in ("all", "trace", *passes) and name not in _unmatched:
            _unmatched.add(name)
            warn_user(
                f"nothing is printed after {name!r}, which FXSPLIT_PRINT_AFTER names: this chain has all, trace, "
                f"{', '.join(passes)}"
            )
    if names:
        observers.append(PrintAfter(names))
    return observers
