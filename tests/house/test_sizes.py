"""Files, functions and lists of parameters stay short."""

from __future__ import annotations

from pathlib import Path

from tests.house.sources import ROOT, body_lines, functions, modules, parameters

MAX_FILE_LINES, MAX_BODY_LINES, MAX_PARAMETERS = 600, 50, 8
# Verbs of the public face: their keywords are the user's options.
VERBS = {
    "api.compile": "compile",
    "api.plan": "plan",
    "api.profile": "profile",
    "schedule.solver.search": "search",
}


def is_kernel(name: str) -> bool:
    """Return whether a module holds loops that numba compiles, in which function calls would cost time."""
    return "kernels" in name.split(".")


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
