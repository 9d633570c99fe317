"""Checkpoint folders: checkpoints that are kept, removed and left, also with several writers."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from fxsplit.errors import FileError
from fxsplit.formats.weights import checkpoint_folder
from fxsplit.formats.weights.checkpoint_folder import Manifest, NewCheckpoint, list_checkpoints, make_token, put_back
from tests.support.programs import Program


def begin(folder: Path, step: int) -> NewCheckpoint:
    new = NewCheckpoint(folder, step, make_token())
    new.begin()
    (new.beside / "model.safetensors").write_bytes(b"x")
    return new


def save(folder: Path, step: int, keep: int | None = None) -> Path:
    new = begin(folder, step)
    new.complete(Manifest(step, ["model.safetensors"]), keep)
    return new.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_new_one_always_stays_and_counts(tmp_path: Path, keep: int) -> None:
    for step in (100, 101, 102):
        save(tmp_path, step)
    for step in (1, 2, 3, 0, 50):
        path = save(tmp_path, step, keep)
        assert path.is_dir() and len(names(tmp_path)) == keep
    assert set(names(tmp_path)) == {f"step-{step}" for step in (3, 0, 50)[-keep:]}


def test_those_saved_last_are_kept_whatever_their_steps(tmp_path: Path) -> None:
    for step in (5, 6, 7):
        save(tmp_path, step, 3)
    save(tmp_path, 4, 3)  # set back
    assert names(tmp_path) == ["step-4", "step-6", "step-7"]
    save(tmp_path, 6, 2)  # again
    assert names(tmp_path) == ["step-4", "step-6"]


def test_clocks_that_differ_do_not_matter(tmp_path: Path) -> None:
    """Another host's clock is an hour ahead."""
    path = save(tmp_path, 1) / "checkpoint.json"
    ahead = path.stat().st_mtime_ns + 3600 * 10**9
    os.utime(path, ns=(ahead, ahead))
    save(tmp_path, 9, keep=2)
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-3", "step-9"]


def test_only_own_names_are_checkpoints(tmp_path: Path) -> None:
    """Other tools and people count otherwise; nothing of theirs is the latest, replaced or removed."""
    path = save(tmp_path, 3)
    for other in ("step-007", "step-\u0667", "step-1_0", "step--1", "step-", "step-9.bak"):
        shutil.copytree(path, tmp_path / other)
    (tmp_path / "step-12").write_text("notes")
    (tmp_path / "step-13").mkdir()
    (tmp_path / "step-13" / "weights.bin").write_text("of another tool")
    (tmp_path / "step-14").mkdir()
    (tmp_path / "step-14" / "checkpoint.json").write_text('{"format": "of another tool"}')
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-3", "step-14"]
    before = set(names(tmp_path))
    save(tmp_path, 4, keep=1)
    assert set(names(tmp_path)) == before - {"step-3"} | {"step-4"}
    for step in (12, 13, 14):
        new = begin(tmp_path, step)
        with pytest.raises(FileError, match=rf"step-{step}' exists and is not a readable checkpoint"):
            new.check_place()
        with pytest.raises(FileError, match=rf"step-{step}' exists and is not a readable checkpoint"):
            new.complete(Manifest(step, []), None)
        new.abandon()
    assert set(names(tmp_path)) == before - {"step-3"} | {"step-4"}
    assert (tmp_path / "step-12").read_text() == "notes"


def test_a_link_to_a_checkpoint_beside_it_is_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    """A link to the best one was the latest, counted in keep=, and was left without what it led to."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    for name, target in (("step-9", "step-2"), ("step-8", tmp_path / "step-1"), ("step-7", "step-9")):
        (tmp_path / name).symlink_to(target)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-1", "step-2"]
    save(tmp_path, 3, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-2", "step-3"]
    save(tmp_path, 9)
    assert not (tmp_path / "step-9").is_symlink()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-2", "step-3", "step-9"]


def test_an_empty_folder_and_a_link_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    save(tmp_path, 1)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(save(tmp_path, 2), elsewhere)
    (tmp_path / "step-2").symlink_to(elsewhere)
    save(tmp_path, 2)
    assert not (tmp_path / "step-2").is_symlink() and (elsewhere / "checkpoint.json").is_file()
    (tmp_path / "step-0").symlink_to(elsewhere)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["elsewhere", "step-3"] and (elsewhere / "checkpoint.json").is_file()


def test_what_another_writer_writes_is_left_alone(tmp_path: Path) -> None:
    first, second = begin(tmp_path, 1), begin(tmp_path, 1)
    save(tmp_path, 2, keep=1)
    assert first.beside.is_dir() and second.beside.is_dir()
    for new in (first, second):
        new.complete(Manifest(1, ["model.safetensors"]), None)
    assert names(tmp_path) == ["step-1", "step-2"]
    assert names(tmp_path / "step-1") == ["checkpoint.json", "model.safetensors"]


WRITER = """
import sys, time
from pathlib import Path
from fxsplit.formats.weights.checkpoint_folder import NewCheckpoint
new = NewCheckpoint(Path(sys.argv[1]), 7, "ab12")
new.begin()
print("begun", flush=True)
time.sleep(100)
"""


def test_what_another_process_writes_is_left_alone_until_it_is_gone(tmp_path: Path) -> None:
    with Program(WRITER, str(tmp_path)) as other:
        assert other.read_line() == "begun"
        save(tmp_path, 1)
        assert names(tmp_path) == [".fxsplit-step-7-ab12", "step-1"]
        other.send_signal(signal.SIGKILL)
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_what_is_left_of_writers_that_are_gone_is_removed(tmp_path: Path) -> None:
    """Leftovers of an fxsplit without locks are removed too; a folder that only has such a name is not."""
    for left in (".fxsplit-step-3-0123456789abcdef", ".fxsplit-step-4-0123456789abcdef-old", ".fxsplit-step-5-ff"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".fxsplit-step-mine").mkdir()
    (tmp_path / ".fxsplit-step-1-ab").write_text("a file")
    save(tmp_path, 1)
    assert names(tmp_path) == [".fxsplit-step-1-ab", ".fxsplit-step-mine", "step-1"]


def test_a_checkpoint_that_was_being_replaced_is_put_back(tmp_path: Path) -> None:
    """Its writer was killed between moving the old one away and the new one to its place."""
    old = save(tmp_path, 3)
    mark = (old / "checkpoint.json").read_text()
    os.rename(old, tmp_path / ".fxsplit-step-3-aa-old")
    (tmp_path / ".fxsplit-step-3-aa").mkdir()
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-3", "step-4"] and (old / "checkpoint.json").read_text() == mark
    # If the new checkpoint is in its place, the old one is removed.
    shutil.copytree(old, tmp_path / ".fxsplit-step-3-bb-old")
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-3", "step-4"]


def test_whoever_looks_for_the_latest_finds_what_was_being_replaced(tmp_path: Path) -> None:
    old, moved = save(tmp_path, 3), tmp_path / ".fxsplit-step-3-aa-old"
    os.rename(old, moved)
    put_back(tmp_path)
    assert names(tmp_path) == ["step-3"]
    # A checkpoint that was being removed is not put back: its manifest is removed first.
    os.rename(old, moved)
    (moved / "checkpoint.json").unlink()
    put_back(tmp_path)
    put_back(tmp_path / "nowhere")
    assert names(tmp_path) == []


def test_a_move_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 3)
    mark, new, rename = (path / "checkpoint.json").stat().st_mtime_ns, begin(tmp_path, 3), os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(source) == new.beside:
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(FileError, match=r"cannot complete .*step-3' \(No space left on device\): make room"):
        new.complete(Manifest(3, []), None)
    new.abandon()
    assert names(tmp_path) == ["step-3"] and (path / "checkpoint.json").stat().st_mtime_ns == mark


def test_a_folder_that_stays_locked_is_a_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "LOCK_LIMIT_S", 0.2)
    hold = "from fxsplit.formats.weights.checkpoint_folder import _hold_folder as hold\nheld = hold(new.path.parent)\n"
    code = WRITER.replace("new.begin()", hold + "held.__enter__()")
    with Program(code, str(tmp_path)) as other:
        assert other.read_line() == "begun"
        with pytest.raises(FileError, match=r"lock' has been locked by another process for .* end that process"):
            begin(tmp_path, 1)
    save(tmp_path, 1)  # the lock of a process that is gone holds nobody up
    assert names(tmp_path) == ["step-1"]
