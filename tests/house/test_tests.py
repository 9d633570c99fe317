"""Tests lie in the room of the file that they test, and make test or make test-long runs each of them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.sources import ROOT, files_of_tests

WHOLE = {"proof", "house", "docs"}  # rooms of tests about the whole project: its promise, its code, its text


def mirrors(path: Path) -> bool:
    """Return whether a file of tests is named after a file or folder of the room, as test_machine.py after machine.py.

    A room may be tested as a whole (tests/runtime/test_runtime.py), and tests may be split by topic
    (test_compile_arguments.py for compile.py, test_custom_passes.py for passes/). A collection of bugs mirrors nothing.
    """
    name, folder = path.stem.removeprefix("test_"), path.parent
    inside = ROOT / folder if folder.parts[:1] in (("passes",), ("bench",)) else ROOT / "fxsplit" / folder
    if not inside.is_dir():
        return False
    words = name.split("_")
    known = {
        "_".join(part) for cut in range(len(words)) for part in (words[: cut + 1], words[cut:]) if "bugs" not in words
    }
    return any((inside / f"{stem}.py").is_file() or (inside / stem).is_dir() or stem == inside.name for stem in known)


def test_every_file_of_tests_lies_beside_what_it_tests() -> None:
    stray = [path for path in files_of_tests() if path.parts[0] not in WHOLE and not mirrors(path)]
    assert stray == [], f"name a file, a folder or the room, or use one of {sorted(WHOLE)}"


def test_a_stray_file_of_tests_is_noticed() -> None:
    assert mirrors(Path("api/test_compile.py")) and mirrors(Path("api/test_compile_arguments.py"))
    for stray in (
        "api/test_bugs.py",
        "runtime/test_runtime_bugs.py",
        "nowhere/test_compile.py",
        "runtime/test_compile.py",
        "test_compile.py",
    ):
        assert not mirrors(Path(stray)), stray


def test_every_test_is_run_by_one_of_two_targets() -> None:
    targets = dict(re.findall(r"^(test|test-long):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(targets) == {"test", "test-long"}
    assert '-m "not long"' in targets["test"] and "-m long" in targets["test-long"]
    for recipe in targets.values():
        (command,) = [line for line in recipe.splitlines() if "-m pytest" in line]
        assert not re.search(r"--ignore|--deselect|-k |tests/", command), f"{command}: it leaves tests out"
    run = (ROOT / ".ci" / "run").read_text()
    for target in ("test", "test-long", "test-newest"):
        assert re.search(rf"^ *make {target}$", run, re.MULTILINE)
