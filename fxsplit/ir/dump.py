"""Observers that write the IR to a folder or a trace after each pass, and those that environment variables ask for."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fxsplit.errors import FileError
from fxsplit.ir.chain import Chain
from fxsplit.ir.dump_folder import RUN, begin_dump, clear_folder, is_of, mark_folder
from fxsplit.ir.graph import IR, name_pass
from fxsplit.ir.manager import Observer
from fxsplit.ir.observers import Printer
from fxsplit.ir.text.write import render
from fxsplit.system.figures import replace_infinite
from fxsplit.system.files import write_whole
from fxsplit.system.user_lines import warn_user


@dataclass
class DumpTo(Observer):
    """Writes `00-trace.ir` before the first pass, then `01-profile.ir` and so on after each pass.

    If a fact or the graph is wrong after a pass, the file is `04-partition.failed.ir`, and begins with the error.
    `chain.json` says which model, mode and chain the dump is of, what each pass took and noted, and the error if a pass
    has failed.
    chain: the chain as text.
    """

    folder: Path
    chain: str = ""
    _count: int = field(default=0, init=False)
    _run: str = field(default="", init=False, compare=False)
    _failed: bool = field(default=False, init=False)

    def of_candidate(self, name: str) -> DumpTo:
        """Return an observer that writes to `candidates/name` in the folder, for a plan that is only tried."""
        candidates = self.folder / "candidates"
        if not candidates.exists():
            clear_folder(candidates)
        return DumpTo(candidates / _name_file(name), self.chain)

    def compare_candidates(self, step_ms: Mapping[str, float], refused: Mapping[str, str]) -> None:
        """Write to `candidates/chain.json` how long a step of each candidate takes, and why the others have no plan."""
        chosen = min(step_ms, key=lambda name: step_ms[name], default=None)
        compared = {"chosen": chosen, "step_ms": dict(step_ms), "refused": dict(refused)}
        mark_folder(self.folder / "candidates", compared)

    def start(self, ir: IR) -> None:
        """Write the traced IR, and replace an earlier dump.

        Raises FileError if the folder or the file cannot be created, or if the folder holds other files.
        """
        self._run = secrets.token_hex(8)
        begin_dump(self.folder, self._run)
        # Each run of a chain numbers its files from 0, even if one observer watches several runs.
        self._count, self._failed = 0, False
        self.after("trace", ir)

    def after(self, name: str, ir: IR) -> None:
        """Write the IR after a pass to the next numbered file.

        Only a failure to write the first file is an error. A later failure is only a warning: an error would throw
        away all measurements made so far.
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
        """Write an IR in which a check has found an error. The file begins with the error."""
        if self._is_lost(ir):
            return
        lines = "".join(f"; {line}\n" for line in f"{type(error).__name__}: {error}".splitlines())
        self._write(f"{name}.failed", lines + render(ir))
        self._mark(ir, failed=f"after {name}: {type(error).__name__}: {error}")
        self._failed = True

    def raised(self, rest: Chain, ir: IR, error: Exception) -> None:
        """Write the error that a pass has raised to `chain.json`, for example that no plan fits."""
        if not self._failed and not self._is_lost(ir):
            self._mark(ir, failed=f"in {name_pass(rest[0])}: {type(error).__name__}: {error}")

    def _is_lost(self, ir: IR) -> bool:
        """Return whether another compile has taken over the folder, and warn once: files of two dumps must not mix."""
        if self._run and not is_of(self.folder, self._run):
            self._run = ""
            warn_user(
                f"the dump of {ir.model} in {str(self.folder)!r} ends here, as another compile dumps there by now, or "
                "the folder has been removed: give each compile a folder of its own"
            )
        return not self._run

    def _mark(self, ir: IR, **more: str) -> None:
        """Write `chain.json`: the model, the mode, the shapes and the passes run so far."""
        # Found by name: importing its class would load torch, and an IR from a file has only its text.
        example: Any = next((fact for kind, fact in ir.facts.items() if kind.__name__ == "Example"), None)
        entries: dict[str, object] = {
            "model": ir.model,
            "mode": ir.mode,
            "shapes": example.describe() if hasattr(example, "describe") else {},
        }
        passes = [{"pass": s.text, "seconds": round(s.seconds, 6), "noted": dict(s.noted)} for s in ir.steps]
        versions = {"fxsplit": version("fxsplit"), "torch": version("torch")}
        entries[RUN] = self._run
        entries |= {"chain": self.chain, "passes": replace_infinite(passes), "versions": versions}
        mark_folder(self.folder, {**entries, **more})

    def _write(self, name: str, text: str) -> None:
        """Write the next numbered file."""
        write_whole(self.folder / f"{self._count:02d}-{_name_file(name)}.ir", text)


@dataclass
class TraceToTorch(Observer):
    """Writes the IR after each pass to torch's structured trace, as artifacts such as `fxsplit_01_profile`.

    The environment variable TORCH_TRACE names the folder of the trace, and tlparse shows it.
    """

    _count: int = field(default=0, init=False)

    def start(self, ir: IR) -> None:
        """Write the IR before the first pass."""
        self._count = 0
        self.after("trace", ir)

    def after(self, name: str, ir: IR) -> None:
        """Write the IR after a pass."""
        # Loads torch, and a chain on an IR from a file may run without it.
        from fxsplit.torch_internals.torch_compile.structured_trace import write_artifact

        write_artifact(f"fxsplit_{self._count:02d}_{_name_file(name)}", render(ir))
        self._count += 1


def _name_file(name: str) -> str:
    """Return the name of a pass as part of a file name, without characters such as a slash."""
    return re.sub(r"[^\w.<>-]", "_", name)


_unmatched: set[str] = set()


def make_observers(folder: Path | None, chain: Chain) -> list[Observer]:
    """Return the observers of a chain.

    They are a DumpTo if a `folder` is given, a TraceToTorch if TORCH_TRACE is set, and a Printer if FXSPLIT_PRINT_AFTER
    names passes. A name in FXSPLIT_PRINT_AFTER that is not a pass of this chain gets a warning, once: it may be a pass
    of another pipeline's chain.
    """
    observers: list[Observer] = []
    if folder is not None:
        observers.append(DumpTo(folder, str(chain)))
    if os.environ.get("TORCH_TRACE"):
        observers.append(TraceToTorch())
    passes = [name_pass(step) for step in chain]
    names = tuple(filter(None, (n.strip() for n in os.environ.get("FXSPLIT_PRINT_AFTER", "").split(","))))
    for name in names:
        # A misspelt name would silently print nothing.
        if name not in ("all", "trace", *passes) and name not in _unmatched:
            _unmatched.add(name)
            warn_user(
                f"nothing is printed after {name!r}, which FXSPLIT_PRINT_AFTER names: this chain has all, trace, "
                f"{', '.join(passes)}"
            )
    if names:
        observers.append(Printer(after_passes=names))
    return observers
