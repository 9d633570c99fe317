"""Every code block of the README and of docs/ is run, and its output is compared with the output shown below it.

The blocks of one page are run in order (run_page.py), so that they may build on each other. Shell blocks may call
`fxsplit` only; anything else needs a mark with a reason (see markdown.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT, Block, read_blocks
from tests.docs.run_page import rewrite_outputs, run_page

RUN = [page for page in PAGES if any(b.language in ("python", "sh") and not b.mark for b in read_blocks(page))]
# The schedule that compile() chooses depends on measured times, as numbers do.
_VARYING = re.compile(r"\b(?:1F1B|GPipe|ZB-H1|ZB-H2)\b|[\d.]+(?: (?:[KMG]iB|B|ms))?")


@pytest.fixture
def small_weights_count() -> None:
    """Keep the limit that users have: a page's weights are too small for a backward in two halves."""


def compare_output(block: Block, printed: str) -> None:
    """Compare a real output with a block that shows it; numbers and names of schedules may differ if it varies."""
    shown = block.text
    if block.mark == "output varies":
        shown, printed = (" ".join(_VARYING.sub("#", text).split()) for text in (shown, printed))
    lines = [[line.rstrip() for line in text.strip("\n").splitlines()] for text in (shown, printed)]
    assert lines[1] == lines[0], f"{block} shows another output than is printed"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    for block, printed in run_page(page, tmp_path):
        compare_output(block, printed)


def test_shown_outputs_are_rewritten(tmp_path: Path) -> None:
    """A stale output is replaced by the real output; an output that varies, and the rest of the page, stay."""
    page = tmp_path / "page.md"
    text = "# A page\n```python\nprint(2)\nprint(3)\n```\n```text\n{}\n```\n"
    text += "and\n```python\nprint(4)\n```\n{}```text\n{}\n```\n"
    page.write_text(text.format("stale\nstale", "", "").replace("\n\n", "\n"))
    rewrite_outputs(page)
    assert page.read_text() == text.format("2\n3", "", "4")
    page.write_text(text.format("stale", "<!-- output varies: a reason -->\n", "5"))
    rewrite_outputs(page)
    assert page.read_text() == text.format("2\n3", "<!-- output varies: a reason -->\n", "5")


def test_the_readme_and_every_page_of_docs_but_lists_and_answers_are_run() -> None:
    # test_generation.py runs the blocks of generation.md, which need transformers.
    unrun = {"index.md", "limits.md", "faq.md", "generation.md", "comparison.md", "reference.md"}
    assert set(RUN) >= {ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if p.name not in unrun)}


def test_every_block_is_run_shown_or_marked() -> None:
    for page in PAGES:
        for block in read_blocks(page):
            looked_after = block.language in ("python", "sh") or block.mark or block.output_of_last
            assert looked_after, f"{block}: a block of {block.language or 'no language'} that nothing looks at"


def test_the_first_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    assert max((ROOT / name).stat().st_size for name in ("CONTRIBUTING.md", "CHANGELOG.md")) <= 8192
