"""Lines of code: blank lines, comments and docstrings do not count, and links are not counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lines import FOLDERS, Count, count_lines, list_table, main, read_folder

SOURCE = '''"""A module,
of two lines."""

from os import (  # three lines of imports
    path,
)

WIDTH = 4  # a comment beside code
"""The width."""
# a comment

TEXT = """
# code,

all of it"""


def run() -> str:
    """Return a text."""
    return "a" \\
        "b"
'''


def test_code_alone_is_counted() -> None:
    assert count_lines(SOURCE) == Count(1, 3 + 1 + 4 + 3, 3)
    assert count_lines("") == count_lines("# nothing\n") == Count(1, 0, 0)


def test_every_file_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    paths = [path for path, _ in read_folder()]
    found = {p.relative_to(root).as_posix() for folder in FOLDERS for p in (root / folder).rglob("*.py")}
    assert set(paths) == {p for p in found if not p.startswith("fxsplit/passes/")} and len(paths) == len(set(paths))
    main([])
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last[:2] == ["all", str(len(paths))]


def test_the_last_line_is_the_sum() -> None:
    table = list_table({"a": Count(1, 10, 2), "b": Count(2, 30, 2)})
    assert [line.split() for line in table[1:]] == [
        ["a", "1", "10", "2", "20.0%"],
        ["b", "2", "30", "2", "6.7%"],
        ["all", "3", "40", "4", "10.0%"],
    ]
