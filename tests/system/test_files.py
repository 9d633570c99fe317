"""Files are written whole or not at all, whatever goes wrong, and errors say what to do."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxsplit.errors import FileError, FxsplitError
from fxsplit.system.files import check_can_write, make_folder, write_whole
from tests.support.refusals import full_disk, refused


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A cut-off file stood in the place of the old one."""
    path = tmp_path / "file"
    write_whole(path, "old")
    with full_disk(), refused(FileError, "cannot write '.*file' .*: make room; nothing was changed there"):
        write_whole(path, "x" * 5000)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    with full_disk(), pytest.raises(OSError) as caught:
        write_whole(tmp_path / "new", b"x" * 5000)
    assert caught.value.errno == errno.EFBIG and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "broken"), MemoryError()])
def test_whatever_goes_wrong_the_old_file_stays_and_nothing_else(
    name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(FileError if isinstance(error, OSError) else type(error)):
        write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def in_a_missing_folder(folder: Path) -> tuple[str, str]:
    return str(folder / "none" / "file"), "make its folder first"


def a_folder(folder: Path) -> tuple[str, str]:
    return str(folder), "it is a folder: give the name of a file"


def inside_a_file(folder: Path) -> tuple[str, str]:
    (folder / "file").write_text("old")
    return str(folder / "file" / "x"), "a part of the path is a file"


def with_a_null_byte(folder: Path) -> tuple[str, str]:
    return str(folder / "a\0b"), "give another path"


def too_long(folder: Path) -> tuple[str, str]:
    return str(folder / ("x" * 300)), "give another path"


def in_a_circle(folder: Path) -> tuple[str, str]:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return str(folder / "a"), "give another path"


def not_unicode(folder: Path) -> tuple[str, str]:
    return str(folder / "a\ud800"), "give another path"


def empty(folder: Path) -> tuple[str, str]:
    return "", "give the name of a file"


def full_device(folder: Path) -> tuple[str, str]:
    return "/dev/full", "make room"


@pytest.mark.parametrize(
    "case",
    [
        in_a_missing_folder,
        a_folder,
        inside_a_file,
        with_a_null_byte,
        too_long,
        in_a_circle,
        not_unicode,
        empty,
        full_device,
    ],
)
def test_paths_that_cannot_be_written_are_named(case: Callable[[Path], tuple[str, str]], tmp_path: Path) -> None:
    """Each was a bare error of the operating system, or a ValueError."""
    path, step = case(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileError) as caught:
        write_whole(path, "x")
    assert repr(path) in str(caught.value) and step in str(caught.value)
    assert isinstance(caught.value, (OSError, FxsplitError))
    # A device that is full says so only when it is written.
    if case is not full_device:
        with pytest.raises(FileError) as early:
            check_can_write(path)
        assert str(early.value) == str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_file_that_can_be_written_stays_unchanged_until_then(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for path in (tmp_path / "file", tmp_path / "new", "/dev/stdout"):
        check_can_write(path)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_folders_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with refused(FileError, "cannot make the folder '.*file': a file has that name"):
        make_folder(tmp_path / "file")
    for bad in (tmp_path / "file" / "x", "a\0b", "/proc/none/x"):
        with pytest.raises(FileError) as caught:
            make_folder(bad)
        assert repr(str(bad)) in str(caught.value)


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    write_whole(path, "old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_read_umask()
    path.chmod(0o640)
    link.symlink_to("file")
    write_whole(link, "new")
    assert link.is_symlink() and path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    (tmp_path / "dangling").symlink_to("target")
    write_whole(tmp_path / "dangling", "made")
    assert (tmp_path / "target").read_text() == "made" and (tmp_path / "dangling").is_symlink()


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o444)
    with refused(FileError, "give a path that you may write to"):
        write_whole(path, "new")


def test_pipes_and_standard_output_are_written_to(tmp_path: Path) -> None:
    """A device or a pipe has no contents to keep: it must not become a file."""
    code = "from fxsplit.system.files import write_whole; print('a', flush=True); write_whole('/dev/stdout', 'b\\n')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "a\nb\n"
    write_whole("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
