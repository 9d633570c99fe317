"""Every code block of the README and of docs/ is run; what a block prints is compared with the output shown below it.

The blocks of one page are run in order, in one namespace and one temporary folder, so that they may build on each
other. Shell blocks may call `fxsplit` alone; anything else needs a mark with a reason (see markdown.py).
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from fxsplit.cli.main import main
from tests.docs.markdown import PAGES, ROOT, Block, read_blocks

RUN = [page for page in PAGES if any(b.language in ("python", "sh") and not b.mark for b in read_blocks(page))]
_NUMBER = re.compile(r"[\d.]+(?: (?:[KMG]iB|B|ms))?")


def run_python(block: Block, namespace: dict[str, object]) -> None:
    """Run a block; a traceback names the lines of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
    exec(code, namespace)


def run_shell(block: Block, folder: Path) -> None:
    """Run the `fxsplit` commands of a block in this process; `> FILE` takes what a command prints."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "fxsplit", f"{block}: {line!r} is not run: mark the block with a reason"
        if words[-2:-1] == [">"]:
            with (folder / words[-1]).open("w") as file, redirect_stdout(file):
                code = main(words[1:-2])
        else:
            code = main(words[1:])
        assert code == 0, f"{block}: {line!r} exits with {code}"


def compare_output(block: Block, printed: str) -> None:
    """Compare what was printed with a block that shows it; where output varies, numbers and their units may differ."""
    shown = block.text
    if block.mark == "output varies":
        shown, printed = (" ".join(_NUMBER.sub("#", text).split()) for text in (shown, printed))
    lines = [[line.rstrip() for line in text.strip("\n").splitlines()] for text in (shown, printed)]
    assert lines[1] == lines[0], f"{block} shows another output than is printed"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")  # drawings are as wide as the terminal
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    before, printed = set(sys.modules), ""
    try:
        for block in read_blocks(page):
            if block.output_of_last:
                compare_output(block, printed)
            if block.mark == "file":
                target = tmp_path / block.detail
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
            if block.mark or block.language not in ("python", "sh"):
                continue
            output = io.StringIO()
            with redirect_stdout(output):
                if block.language == "python":
                    run_python(block, module.__dict__)
                else:
                    run_shell(block, tmp_path)
            printed = output.getvalue()
    finally:
        # The worker threads of the page's pipelines end with the last reference to each pipeline.
        module.__dict__.clear()
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]


def test_the_readme_and_every_page_of_docs_but_lists_and_answers_are_run() -> None:
    # test_generation.py runs the blocks of generation.md, which need transformers.
    unrun = {"index.md", "limits.md", "faq.md", "generation.md"}
    assert set(RUN) >= {ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if p.name not in unrun)}


def test_every_block_is_run_shown_or_marked() -> None:
    for page in PAGES:
        for block in read_blocks(page):
            looked_after = block.language in ("python", "sh") or block.mark or block.output_of_last
            assert looked_after, f"{block}: a block of {block.language or 'no language'} that nothing looks at"


def test_the_first_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    assert (ROOT / "CHANGELOG.md").stat().st_size <= 8192
