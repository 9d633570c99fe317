"""Observers of a chain. They print IRs, or the differences between them, and write a reproducer of a failure.

They watch `manager.run_chain`, and never change the IR. A user's own observer is a subclass of Observer.
"""

from __future__ import annotations

import difflib
import platform
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO, cast

from fxsplit.errors import NoFit
from fxsplit.ir.chain import Chain, can_be_named, pass_text
from fxsplit.ir.graph import IR, Pass, name_pass
from fxsplit.ir.manager import Observer
from fxsplit.ir.text.write import render
from fxsplit.system.files import make_folder, write_whole
from fxsplit.system.shown import Table
from fxsplit.system.shown import render as render_parts

REPRODUCER = "fxsplit-repro.ir"
"""The name of the file that is written when a pass fails."""


@dataclass
class Printer(Observer):
    """Prints the IR before `before_passes` and after `after_passes`, to `file` (default: the standard output).

    "all" means every pass, and "trace" the IR before the first pass. "changed" prints the IR after each pass that has
    changed it, and "failed" the IR in which a check has found an error.
    """

    before_passes: tuple[str, ...] = ()
    after_passes: tuple[str, ...] = ()
    file: TextIO | None = None
    _last: str = field(default="", init=False, repr=False)

    def start(self, ir: IR) -> None:
        """Print the traced IR if "trace" or "all" is in `after_passes`."""
        self._last = render(ir) if "changed" in self.after_passes else ""
        if not {"trace", "all"}.isdisjoint(self.after_passes):
            self._print("after trace", ir)

    def before(self, name: str, ir: IR) -> None:
        """Print the IR before a pass if the pass is in `before_passes`."""
        if not {name, "all"}.isdisjoint(self.before_passes):
            self._print(f"before {name}", ir)

    def after(self, name: str, ir: IR) -> None:
        """Print the IR after a pass if the pass is in `after_passes`, or if the pass has changed it."""
        asked = not {name, "all"}.isdisjoint(self.after_passes)
        if "changed" in self.after_passes:
            text = drop_steps(render(ir))
            asked, self._last = asked or text != drop_steps(self._last), text
        if asked:
            self._print(f"after {name}", ir)

    def failed(self, name: str, ir: IR, error: Exception) -> None:
        """Print an IR in which a check has found an error, if `after_passes` asks for it."""
        if not {name, "all", "failed"}.isdisjoint(self.after_passes):
            self._print(f"failed after {name}: {' '.join(str(error).split())}", ir)

    def _print(self, what: str, ir: IR) -> None:
        """Print an IR after a line that says at which point of the chain it is."""
        print(f"; {what}\n{render(ir)}", file=self.file or sys.stdout)


def drop_steps(text: str) -> str:
    """Return the text of an IR without the list of steps, to which every pass adds a line."""
    return re.sub(r"(?m)^step .*\n", "", text)


@dataclass
class Differ(Observer):
    """Prints what each pass changes in the text of the IR, as a unified diff, to `file` (default: standard output)."""

    file: TextIO | None = None
    _last: str = field(default="", init=False, repr=False)

    def start(self, ir: IR) -> None:
        """Keep the text of the IR before the first pass, to compare."""
        self._last = render(ir)

    def after(self, name: str, ir: IR) -> None:
        """Print how the text differs from the text before the pass."""
        text = render(ir)
        before, after = self._last.splitlines(keepends=True), text.splitlines(keepends=True)
        lines = difflib.unified_diff(before, after, f"before {name}", f"after {name}")
        print("".join(lines), end="", file=self.file or sys.stdout)
        self._last = text


@dataclass
class Timer(Observer):
    """Records the time of each pass, the numbers of nodes before and after it, and the figures that it notes."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    _last: IR | None = field(default=None, init=False, repr=False)

    def start(self, ir: IR) -> None:
        """Keep the IR before the first pass, to compare."""
        self._last = ir

    def after(self, name: str, ir: IR) -> None:
        """Record the time of a pass, and what it has learnt and forgotten."""
        assert self._last is not None
        learnt = [kind.__name__ for kind, fact in ir.facts.items() if self._last.facts.get(kind) is not fact]
        known = {kind.__name__ for kind in ir.facts}
        forgot = [kind.__name__ for kind in self._last.facts if kind.__name__ not in known]
        row = {"pass": pass_text(cast(Pass, ir.steps[-1].run)), "ms": 1000 * ir.steps[-1].seconds}
        row |= {"nodes_before": len(self._last.gm.graph.nodes), "nodes_after": len(ir.gm.graph.nodes)}
        self.rows.append({**row, "learnt": learnt, "forgot": forgot, "noted": dict(ir.steps[-1].noted)})
        self._last = ir

    def __str__(self) -> str:
        heads = ("pass", ">ms", ">nodes before", ">after", "learnt", "forgot")
        rows = [
            (r["pass"], f"{r['ms']:.3f}", r["nodes_before"], r["nodes_after"], _join(r["learnt"]), _join(r["forgot"]))
            for r in self.rows
        ]
        return render_parts([Table(heads, rows)])

    def show_noted(self) -> str:
        """Return a table of the figures that each pass has noted."""
        noted = [(row["pass"], name, value) for row in self.rows for name, value in row["noted"].items()]
        return render_parts([Table(("pass", "figure", ">value"), noted)])


def _join(names: list[str]) -> str:
    """Return names in one text, and a dash for none."""
    return ", ".join(names) or "-"


CHAIN = "; chain: "
"""The beginning of the line that lists, in a reproducer, the passes that are still to run."""


@dataclass
class Reproducer(Observer):
    """Writes the IR before a pass that fails, and the chain from that pass on, to the file `path`.

    `fxsplit opt` on this file runs into the same error. The file has no tensors, so it can be sent to others.
    """

    path: Path  # a file that ends with .ir, or a folder for fxsplit-repro.ir
    written: bool = field(default=False, init=False)
    _text: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        self.path = self.path if self.path.suffix == ".ir" else self.path / REPRODUCER

    def before(self, name: str, ir: IR) -> None:
        """Keep the text of the IR before a pass: if the pass fails, it may have edited its graph in place."""
        self._text = render(ir)

    def raised(self, rest: Chain, ir: IR, error: Exception) -> None:
        """Write the reproducer, and add a note to the error that says how to run it."""
        # "No plan fits" is a result and not a failure.
        if isinstance(error, NoFit):
            return
        self.write(rest, error, self._text or render(ir))
        error.add_note(f"reproducer: {describe_run(self.path, rest)}")

    def write(self, rest: Chain, error: Exception, text: str) -> None:
        """Write the text of an IR, after lines that say which passes are to run and how they fail."""
        first = "".join(f"; {line}\n" for line in _describe(rest, error))
        make_folder(self.path.parent)
        write_whole(self.path, first + text)
        self.written = True


def describe_run(path: Path, rest: Chain) -> str:
    """Return the command that runs a reproducer, or why it does not run elsewhere."""
    odd = next((name_pass(step) for step in rest if not can_be_named(step)), None)
    if odd is not None:
        return (
            f"{path}; pass {odd!r} has no text that another process reads: put it into a module, with options that "
            "are numbers, flags, texts or lists of these, and give -p"
        )
    # Passes that are none of fxsplit's have the names of their modules.
    return f"fxsplit opt {path}{' --trust' * (':' in str(rest))}"


def _describe(rest: Chain, error: Exception) -> list[str]:
    """Return the first lines of a reproducer: how to run it, the passes, the error and the versions."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    versions = f"fxsplit {version('fxsplit')}, torch {version('torch')}, Python {platform.python_version()}"
    return [
        f"reproducer of pass {pass_text(rest[0])}: run fxsplit opt on this file",
        f"{CHAIN.removeprefix('; ')}{rest}",
        f"error: {said}",
        f"versions: {versions}",
    ]


def find_chain(text: str) -> str | None:
    """Return the passes that a reproducer lists as still to run, or None if the text is not a reproducer."""
    for line in text.split("\n"):
        if not line.startswith(";"):
            return None
        if line.startswith(CHAIN):
            return line.removeprefix(CHAIN)
    return None
