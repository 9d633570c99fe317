"""Print the folders of tests for the files that changed since a commit: `python -m tests.support.rooms HEAD~1`.

A changed file of tests is printed itself. `make quick` runs the printed tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED = {"fxsplit": Path("tests"), "passes": Path("tests/passes"), "bench": Path("tests/bench")}
"""The folder of tests for each folder of the project; tests mirror its subfolders."""


def list_changed(base: str) -> list[Path]:
    """Return the files that were changed since a commit, including new files that are not committed."""
    commands = ("diff", "--name-only", "--diff-filter=d", base), ("ls-files", "--others", "--exclude-standard")
    printed = [subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True, check=True) for one in commands]
    return [Path(line) for done in printed for line in done.stdout.splitlines()]


def list_beside(folder: Path) -> set[Path]:
    """Return a folder of tests, or only its files if its subfolders hold tests of other folders."""
    files = {path.relative_to(ROOT) for path in (ROOT / folder).glob("test_*.py")}
    return files if files and any((ROOT / folder).glob("*/test_*.py")) else {folder}


def find_tests(changed: Iterable[Path]) -> list[str]:
    """Return the tests to run for changed files: each folder or file of tests once, none inside another."""
    found = set()
    for path in changed:
        top = path.parts[0]
        if top == "tests" and path.name.startswith("test_"):
            found.add(path)
        elif top in TESTED and path.suffix == ".py":
            folder = TESTED[top].joinpath(*path.parts[1:-1])
            # A folder that is tested as a whole has no folder of tests.
            found |= list_beside(next(f for f in (folder, *folder.parents) if (ROOT / f).is_dir()))
    return sorted(str(path) for path in found if not any(other in path.parents for other in found))


if __name__ == "__main__":
    print(*find_tests(list_changed(sys.argv[1])) or ["tests/house"])
