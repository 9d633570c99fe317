"""`make quick` runs the tests of the folders that have changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.rooms import ROOT, find_tests


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (["fxsplit/planner/search/dense.py", "docs/faq.md"], ["tests/planner/search"]),
        (["passes/profile/clock.py", "passes/profile/weigh.py"], ["tests/passes/profile"]),
        (["fxsplit/planner/search/dense.py", "tests/planner/search/test_dense.py"], ["tests/planner/search"]),
        (["tests/planner/test_clock.py"], ["tests/planner/test_clock.py"]),
        (["bench/fuzz/files.py"], ["tests/bench"]),
        (["fxsplit/errors.py"], ["tests/test_errors.py", "tests/test_errors_suggest.py"]),
        (["README.md"], []),
    ],
)
def test_tests_are_found_beside_what_has_changed(changed: list[str], found: list[str]) -> None:
    assert find_tests(map(Path, changed)) == found


def test_rooms_inside_of_a_room_are_left_to_make_test() -> None:
    found = find_tests([Path("fxsplit/planner/clock.py")])
    assert "tests/planner/test_clock.py" in found and all(path.startswith("tests/planner/test_") for path in found)


def test_every_target_of_make_is_told_of() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (named,) = [line.split()[1:] for line in makefile.splitlines() if line.startswith(".PHONY:")]
    # Tests run inside of make, which would print the folders that it enters.
    make = ["make", "--no-print-directory", "help"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[1] for line in done.stdout.splitlines()] == [name for name in named if name != "help"]
