"""Golden files: the commands in them print what their CHECK lines say."""

from __future__ import annotations

from pathlib import Path

import pytest
from filecheck.matcher import Matcher
from filecheck.options import Options

from fxsplit.passes import PASSES
from tests.proof.golden.run import list_files, run_golden, update


@pytest.mark.parametrize("path", list_files(), ids=lambda path: path.stem)
def test_golden_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "printed").write_text(
        "\n".join(line for line in run_golden(path, tmp_path).split("\n") if line.strip())
    )
    found = Matcher.from_opts(Options(str(path), str(tmp_path / "printed"))).run()
    assert found == 0, capsys.readouterr().err + "\nif the change is right, run: make golden"


def test_every_pass_has_a_golden_file() -> None:
    assert {path.stem for path in list_files()} >= set(PASSES)


def test_an_update_changes_no_file_that_is_right(tmp_path: Path) -> None:
    path = list_files()[0]
    copy = tmp_path / path.name
    copy.write_text(path.read_text())
    update(copy, tmp_path)
    assert copy.read_text() == path.read_text()
