"""Files, functions and lists of parameters stay short, and comments say why."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

from tests.house.sources import ROOT, body_lines, functions, modules, parameters, room

MAX_FILE_LINES, MAX_BODY_LINES, MAX_PARAMETERS = 400, 50, 8
MIN_COMMENTS_PER_1000_LINES = 40
# Verbs of the public face, whose keywords are the options that a user has.
VERBS = {"api.compile": "compile", "api.plan": "plan"}
FOR_TOOLS = re.compile(r"#\s*(type:|noqa|pragma:|ruff:|mypy:|!)")


def is_kernel(name: str) -> bool:
    """Return whether a module holds loops that numba compiles, which calls of functions would slow down."""
    return room(name) == "planner" and "kernels" in name.split(".")


def count_comments(text: str) -> int:
    """Return how many comments a text has that say something to a reader, and not to a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not FOR_TOOLS.match(token.string) for token in tokens)


def test_files_are_short() -> None:
    files: list[Path] = [*modules().values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short_and_take_few_parameters() -> None:
    long, wide = [], []
    for name in modules():
        for place, function in functions(name):
            if not is_kernel(name) and body_lines(function) > MAX_BODY_LINES:
                long.append((place, body_lines(function)))
            if not is_kernel(name) and VERBS.get(name) != function.name and parameters(function) > MAX_PARAMETERS:
                wide.append((place, parameters(function)))
    assert (long, wide) == ([], [])


def test_comments_say_why() -> None:
    texts = [path.read_text(encoding="utf-8") for path in modules().values()]
    comments, lines = sum(map(count_comments, texts)), sum(len(text.splitlines()) for text in texts)
    assert 1000 * comments / lines >= MIN_COMMENTS_PER_1000_LINES, f"{comments} comments in {lines} lines"


def test_comments_for_tools_are_not_counted() -> None:
    assert count_comments("a = 1  # type: ignore[arg-type]\nb = 2  # noqa: E501\n# Why.\nc = '# no comment'\n") == 1
