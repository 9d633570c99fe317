"""Read the project's Markdown: its fenced blocks with the marks before them, its inline code, and its links.

A mark is an HTML comment on the line before a block:

<!-- not run: REASON -->          the block is only looked at
<!-- file: NAME -->               the block is written to this file, and not run
<!-- output varies: REASON -->    of the output shown, numbers and names of schedules may differ
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
)

_MARK = re.compile(r"<!-- (not run|file|output varies): (.+) -->")
_FENCE = re.compile(r"```(\w*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block: the line at which its text starts, its language, and its mark with the reason or name."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    detail: str = ""
    output_of_last: bool = False

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    mark = ("", "")
    between = True  # whether there is text between the last block and this line
    at = 0
    while at < len(lines):
        fence, found = _FENCE.match(lines[at]), _MARK.match(lines[at])
        if fence:
            end = lines.index("```", at + 1)
            text = "\n".join(lines[at + 1 : end]) + "\n"
            shows = fence[1] == "text" and not between and mark[0] not in ("file", "not run")
            blocks.append(Block(page, at + 2, fence[1], text, *mark, shows))
            at, mark, between = end, ("", ""), False
        elif found:
            mark = (found[1], found[2])
        elif lines[at].strip():
            mark, between = ("", ""), True
        at += 1
    return blocks


def read_prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of fenced blocks, with their numbers."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def read_inline_code(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the inline code of a page, each with `page:line`."""
    for number, line in read_prose(page):
        for code in re.findall(r"`([^`]+)`", line):
            yield f"{page.relative_to(ROOT)}:{number}", code


def read_links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the targets of a page's links and pictures, each with `page:line`."""
    for number, line in read_prose(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            yield f"{page.relative_to(ROOT)}:{number}", target


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = (line.lstrip("#").strip() for _, line in read_prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
