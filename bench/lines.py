"""Count the lines of code of the package by top room, and how many of these lines are imports.

Run `python -m bench.lines`; with `--at COMMIT` it counts the files of a commit. A line of code is neither blank, nor a
comment, nor part of a docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("fxsplit", "passes")
WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
"""Kinds of tokens that are no code by themselves."""


class Count(NamedTuple):
    """Numbers of files, of lines of code, and of lines of code that are imports."""

    files: int
    code: int
    imports: int


def count_lines(source: str) -> Count:
    """Return the counts of one file's text."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    imports: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if _is_docstring(node):
            code.difference_update(_list_lines(node))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(_list_lines(node))
    return Count(1, len(code), len(imports & code))


def count_rooms(sources: Iterator[tuple[str, str]]) -> dict[str, Count]:
    """Return the counts by top room, from paths with their texts. Files outside of rooms count as `fxsplit`."""
    rooms: dict[str, Count] = {}
    for path, source in sources:
        top, *rest = path.split("/")
        room = rest[0] if top == "fxsplit" and len(rest) > 1 else top
        held, new = rooms.get(room, Count(0, 0, 0)), count_lines(source)
        rooms[room] = Count(*map(sum, zip(held, new, strict=True)))
    return dict(sorted(rooms.items(), key=lambda item: -item[1].code))


def read_folder(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of the package in a folder. Links to folders are left out."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def read_commit(commit: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of the package in a commit of this clone."""
    packed = subprocess.run(["git", "archive", commit, *FOLDERS], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".py") and (held := archive.extractfile(member)):
                yield member.name, held.read().decode("utf-8")


def list_table(rooms: dict[str, Count]) -> list[str]:
    """Return the counts as lines of text; the last line is their sum."""
    whole = Count(*map(sum, zip(*rooms.values(), strict=True)))
    lines = [f"{'room':<16}{'files':>6}{'code':>8}{'imports':>9}{'share':>8}"]
    for name, count in (*rooms.items(), ("all", whole)):
        share = count.imports / max(1, count.code)
        lines.append(f"{name:<16}{count.files:>6}{count.code:>8}{count.imports:>9}{share:>8.1%}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of this checkout, or of a commit."""
    parser = argparse.ArgumentParser(prog="python -m bench.lines", description=__doc__)
    parser.add_argument("--at", metavar="COMMIT", help="count the files of a commit instead of this checkout")
    commit = parser.parse_args(arguments).at
    print("\n".join(list_table(count_rooms(read_commit(commit) if commit else read_folder()))))


def _is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a text that stands by itself: a docstring, also of the constant above it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _list_lines(node: Any) -> range:
    """Return the numbers of a statement's lines."""
    return range(node.lineno, node.end_lineno + 1)


if __name__ == "__main__":
    main()
