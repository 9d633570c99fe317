"""`make quick` runs the tests beside what has changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.rooms import ROOT, find_tests


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (["fxsplit/planner/clock.py", "docs/faq.md"], ["tests/planner"]),
        (["passes/profile/clock.py", "passes/profile/weigh.py"], ["tests/passes/profile"]),
        (["fxsplit/planner/clock.py", "tests/planner/test_clock.py"], ["tests/planner"]),
        (["tests/planner/test_clock.py"], ["tests/planner/test_clock.py"]),
        (["bench/fuzz/files.py"], ["tests/bench"]),
        (["fxsplit/errors.py"], ["tests"]),
        (["README.md"], []),
    ],
)
def test_tests_are_found_beside_what_has_changed(changed: list[str], found: list[str]) -> None:
    assert find_tests(map(Path, changed)) == found


def test_every_target_of_make_is_told_of() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (named,) = [line.split()[1:] for line in makefile.splitlines() if line.startswith(".PHONY:")]
    # Tests run inside of make, which would tell of folders that it enters.
    make = ["make", "--no-print-directory", "help"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[1] for line in done.stdout.splitlines()] == [name for name in named if name != "help"]
