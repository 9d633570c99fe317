"""Observers of a chain: write every IR to a folder, print some of them, and show how far long work has come.

They watch what `manager.run_chain` does, and never change it. The text of an IR has the steps taken, the graph, and a
section for each fact in the order learnt:

# fxsplit ir: GraphModule
# 1: profile

[graph]
%x = input x()
%layer = module layer(%x) : float32[4, 8]
return %layer

[Costs]
...
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from torch import fx

from fxsplit.errors import ChainError, InputError
from fxsplit.ir.graph import IR
from fxsplit.ir.progress import listen

PATIENCE_S = 1.0
"""Work that takes fewer seconds shows no progress bar."""


@dataclass
class DumpTo:
    """Writes `00-trace.txt` before the first pass, and `01-profile.txt` and so on after each pass."""

    folder: Path
    _count: int = field(default=0, init=False)

    def start(self, ir: IR) -> None:
        """Write the IR as it was traced; raises InputError where the folder cannot be made."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot dump into {str(self.folder)!r}: {error}; give a folder that can be made"
            ) from error
        # Each chain that runs numbers its files from 0, also where one observer watches several.
        self._count = 0
        self.after("trace", ir)

    def after(self, name: str, ir: IR) -> None:
        """Write the IR after a pass, to the file of the next number."""
        (self.folder / f"{self._count:02d}-{name}.txt").write_text(render(ir), encoding="utf-8")
        self._count += 1


@dataclass(frozen=True)
class PrintAfter:
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


def make_observers(
    dump: str | os.PathLike[str] | None, passes: Sequence[str], inside: str = ""
) -> list[DumpTo | PrintAfter]:
    """Return the observers asked for by `dump=` and by FXSPLIT_DUMP and FXSPLIT_PRINT_AFTER in the environment.

    `inside` is a folder to dump into, within the one that is asked for. Raises ChainError when a name in
    FXSPLIT_PRINT_AFTER is none of `passes`.
    """
    observers: list[DumpTo | PrintAfter] = []
    # What the program asks for goes before what its environment asks for.
    folder = dump or os.environ.get("FXSPLIT_DUMP")
    if folder:
        observers.append(DumpTo(Path(folder) / inside))
    names = tuple(filter(None, (n.strip() for n in os.environ.get("FXSPLIT_PRINT_AFTER", "").split(","))))
    for name in names:
        # A misspelt name would print nothing, and leave its user to wonder.
        if name not in ("all", "trace", *passes):
            raise ChainError(f"FXSPLIT_PRINT_AFTER names {name!r}: known are all, trace, {', '.join(passes)}")
    if names:
        observers.append(PrintAfter(names))
    return observers


def render(ir: IR) -> str:
    """Return the text of an IR. Equal IRs give equal texts; only measured figures differ from run to run."""
    sections = [f"# fxsplit ir: {type(ir.gm).__name__}"]
    sections += [f"# {i}: {step.text}" for i, step in enumerate(ir.steps, 1)]
    sections.append("\n[graph]\n" + "\n".join(_render_node(node) for node in ir.gm.graph.nodes))
    # dict keeps the order in which facts were learnt.
    sections += [f"\n[{kind.__name__}]\n{fact}" for kind, fact in ir.facts.items()]
    return "\n".join(sections) + "\n"


def _render_node(node: fx.Node) -> str:
    """Return the line of one node: `%name = kind target(arguments) : shape`, without a shape where none is known."""
    arguments = [_render_value(a) for a in node.args] + [f"{k}={_render_value(v)}" for k, v in node.kwargs.items()]
    # fx's output node has a name of its own that nothing refers to.
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    target = node.target if isinstance(node.target, str) else _name_function(node.target)
    shape = node.meta.get("fxsplit_shape")
    # Words that say what a node is to a reader who does not know torch.fx.
    kind = {"placeholder": "input", "get_attr": "attribute"}.get(node.op, node.op.removeprefix("call_"))
    return f"%{node.name} = {kind} {target}({', '.join(arguments)})" + (f" : {shape}" if shape else "")


def _name_function(target: object) -> str:
    """Return a function's qualified name; for an object without one, that of its type."""
    # The functions of `operator` say that they are of `_operator`, where nobody would look for them.
    module = getattr(target, "__module__", None) or ""
    return f"{module.removeprefix('_')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _render_value(value: object) -> str:
    """Return the text of an argument, in which nodes are %name also inside tuples, lists, dicts and slices."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_render_value(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_render_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_render_value(value.start)}, {_render_value(value.stop)}, {_render_value(value.step)})"
    return repr(value)


@contextmanager
def show_progress() -> Iterator[None]:
    """Show a bar on standard error for tracked work inside the block that takes over a second, on terminals alone."""
    if not sys.stderr.isatty():
        yield
        return
    # rich takes a tenth of a second to load, which programs without a terminal need not wait for.
    from rich.console import Console
    from rich.progress import Progress, TaskID

    bar = Progress(console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}
    begin = time.monotonic()

    # The bar starts late and once: work that follows fast would make it flicker.
    def listener(what: str, done: int, total: int) -> None:
        if time.monotonic() - begin < PATIENCE_S:
            return
        if what not in tasks:
            bar.start()  # does nothing for a bar that is shown already
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    try:
        with listen(listener):
            yield
    finally:
        bar.stop()
