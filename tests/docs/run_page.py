"""Run the blocks of a page in order, in one namespace and one folder, and return the output of each block.

    python -m tests.docs.run_page docs/tour.md

rewrites the outputs that a page shows (`make outputs PAGE=docs/tour.md`). Outputs that vary stay as they are.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import ModuleType
from unittest import mock

from fxsplit.cli.main import main as run_command
from tests.docs.markdown import Block, read_blocks

Shown = tuple[Block, str]
"""A block that shows an output, and the output that was printed."""


def run_python(block: Block, namespace: dict[str, object]) -> None:
    """Run a block; a traceback names the lines of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
    exec(code, namespace)


def run_shell(block: Block) -> None:
    """Run the `fxsplit` commands of a block in this process; `> FILE` takes a command's output."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "fxsplit", f"{block}: {line!r} is not run: mark the block with a reason"
        if words[-2:-1] == [">"]:
            with Path(words[-1]).open("w") as file, redirect_stdout(file):
                code = run_command(words[1:-2])
        else:
            code = run_command(words[1:])
        assert code == 0, f"{block}: {line!r} exits with {code}"


def run_page(page: Path, folder: Path) -> list[Shown]:
    """Run all blocks of a page in an empty folder; return the blocks that show an output, with the real output."""
    module = ModuleType("page")
    loaded = set(sys.modules)
    # Drawings take the width of the terminal.
    with (
        chdir(folder),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        mock.patch.dict(os.environ, COLUMNS="80"),
    ):
        sys.modules["page"] = module
        try:
            return _run_blocks(read_blocks(page), module.__dict__, folder)
        finally:
            # The worker threads of the page's pipelines end with the last reference to each pipeline.
            module.__dict__.clear()
            for name in set(sys.modules) - loaded:
                if name == "page" or str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]


def _run_blocks(blocks: list[Block], namespace: dict[str, object], folder: Path) -> list[Shown]:
    """Run blocks in order; return the blocks that show an output, with the real output of the block before."""
    shown, printed = [], ""
    for block in blocks:
        if block.output_of_last:
            shown.append((block, printed))
        if block.mark == "file":
            target = folder / block.detail
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        if block.mark or block.language not in ("python", "sh"):
            continue
        output = io.StringIO()
        with redirect_stdout(output):
            if block.language == "python":
                run_python(block, namespace)
            else:
                run_shell(block)
        printed = output.getvalue()
    return shown


def rewrite_outputs(page: Path) -> None:
    """Run a page, and write the real outputs into the blocks that show them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        shown = run_page(page, Path(folder))
    for block, printed in reversed(shown):  # from the end, so that the numbers of earlier lines stay right
        if not block.mark:
            start = block.line - 1
            lines[start : lines.index("```", start)] = [line.rstrip() for line in printed.strip("\n").splitlines()]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for path in sys.argv[1:]:
        rewrite_outputs(Path(path).resolve())
