"""fxsplit writes every file whole or not at all, and an error about a file that cannot be written names its path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fxsplit.api.plan import plan
from fxsplit.cli.main import main
from fxsplit.errors import FileError
from fxsplit.formats.plan_json import save_plan
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.report import save_picture, save_trace
from fxsplit.schedule import generate
from fxsplit.schedule.torch_csv import write_csv
from tests.report.timelines import TIMELINE
from tests.support.graphs import node
from tests.support.refusals import full_disk, refused

COSTS = Costs(tuple(node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(9)), (), ("n8",))
WRITERS: dict[str, Callable[[Path], None]] = {
    "profile.json": COSTS.save,
    "plan.json": lambda path: save_plan(plan(COSTS, 3), path),
    "trace.json": lambda path: save_trace([TIMELINE], path),
    "picture.svg": lambda path: save_picture([TIMELINE], path),
    "picture.png": lambda path: save_picture([TIMELINE], path),
    "picture.pdf": lambda path: save_picture([TIMELINE], path),
    "schedule.csv": lambda path: write_csv(generate("1F1B", 4, 64), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    """A file that had taken minutes to make used to be lost, with a truncated file in its place."""
    path = tmp_path / name
    WRITERS[name](path)
    before = path.read_bytes()
    assert len(before) > 300
    with full_disk(300), refused(FileError, f"cannot write '.*{name}'.*make room"):
        WRITERS[name](path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("option", ["--trace", "--to-csv", "--picture"])
def test_the_command_says_which_file_cannot_be_written(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command used to end with a traceback."""
    for path in (tmp_path / "none" / "a.svg", tmp_path / "a\0.svg"):
        assert main(["simulate", option, str(path)]) == 2
        assert repr(str(path)) in capsys.readouterr().err
    path = tmp_path / "a.svg"
    with full_disk(300):
        assert main(["simulate", "--n-microbatches", "64", option, str(path)]) == 2
    assert "make room" in capsys.readouterr().err and os.listdir(tmp_path) == []
