"""Saves of several threads, pipelines and processes: one after another, none lost, each error in the right thread."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.api.checkpoint import storage as checkpoint_storage
from fxsplit.api.pipeline import saving
from fxsplit.errors import FileError, InputError
from tests.support.checkpoints import build, cut, step
from tests.support.programs import run

LAYER = nn.Linear(3, 3)


def run_threads(*functions: Callable[[], object]) -> list[BaseException]:
    """Run each function in its own thread, and return the errors."""
    raised: list[BaseException] = []

    def accumulator(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=accumulator, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return raised


@pytest.mark.parametrize("shared", [True, False])
def test_threads_save_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    write, writing, most = checkpoint_storage.write_tensors, [0], [0]  # type: ignore[attr-defined]

    def count(*args: Any) -> None:
        writing[0] += 1
        most[0] = max(most[0], writing[0])
        write(*args)
        writing[0] -= 1

    monkeypatch.setattr(checkpoint_storage, "write_tensors", count)

    def save(number: int) -> None:
        folder = tmp_path if shared else tmp_path / str(number)
        for i in range(6):
            made = fxsplit.save_checkpoint(folder, LAYER, step=10 * number + i)
            if i % 2:
                assert made.wait().is_dir()

    assert run_threads(*(lambda n=n: save(n) for n in range(4))) == []
    saving.wait_for_saving(LAYER, over_ranks=False)
    found = sorted(int(path.name[5:]) for path in tmp_path.rglob("step-*"))
    assert found == [10 * n + i for n in range(4) for i in range(6)] and most == [1]
    assert not list(tmp_path.rglob(".fxsplit*"))


def test_an_error_is_raised_to_the_thread_whose_save_it_was(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    heard: list[str] = []
    begun, gone_on = threading.Event(), threading.Event()

    def fail() -> None:
        fxsplit.save_checkpoint(tmp_path / "a file", LAYER, step=1)
        begun.set()
        assert gone_on.wait(60)
        with pytest.raises(FileError, match="a file"):
            fxsplit.save_checkpoint(tmp_path, LAYER, step=3)
        heard.append("once")
        fxsplit.save_checkpoint(tmp_path, LAYER, step=4).wait()

    def go_on() -> None:
        assert begun.wait(60)
        for number in (5, 6):
            fxsplit.save_checkpoint(tmp_path, LAYER, step=number).wait()
        gone_on.set()

    assert run_threads(fail, go_on) == [] and heard == ["once"]
    assert {path.name for path in tmp_path.iterdir()} == {"a file", "step-4", "step-5", "step-6"}


def test_wait_never_returns_the_path_of_what_failed(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    made = fxsplit.save_checkpoint(tmp_path / "a file", LAYER, step=1)
    for _ in range(2):
        with pytest.raises(FileError):
            made.wait()
    fxsplit.save_checkpoint(tmp_path, LAYER, step=2).wait()  # it was raised already


def test_close_waits_for_all_saves_of_its_pipeline(tmp_path: Path) -> None:
    model, optimizer = build()
    pipe = cut(model, 2)
    step(pipe, optimizer)
    (tmp_path / "a file").touch()
    assert run_threads(lambda: fxsplit.save_checkpoint(tmp_path / "a file", pipe, optimizer, step=1)) == []
    assert run_threads(lambda: fxsplit.save_checkpoint(tmp_path, pipe, optimizer, step=2)) == []
    with pytest.raises(FileError, match="a file"):
        pipe.close()
    pipe.close()
    assert fxsplit.latest_checkpoint(tmp_path) == tmp_path / "step-2"


def test_the_folder_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, changed = checkpoint_storage.write_tensors, threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoint_storage, "write_tensors", lambda *args: (changed.wait(60), write(*args)))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    made = fxsplit.save_checkpoint("runs", LAYER, step=1)
    monkeypatch.chdir(tmp_path / "second")
    changed.set()
    assert made.wait() == made.path == tmp_path / "first" / "runs" / "step-1" and made.path.is_dir()
    assert not any((tmp_path / "second").iterdir())
    monkeypatch.chdir(tmp_path / "first")
    latest = fxsplit.latest_checkpoint("runs")
    monkeypatch.chdir(tmp_path / "second")
    assert latest == made.path and fxsplit.load_checkpoint(latest, LAYER).step == 1
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InputError, match=r"the current folder is gone .* give the whole path"):
        fxsplit.save_checkpoint("runs", LAYER, step=1)


def test_extra_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, changed = checkpoint_storage.write_tensors, threading.Event()  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoint_storage, "write_tensors", lambda *args: (changed.wait(60), write(*args)))
    losses = [1.0]
    made = fxsplit.save_checkpoint(tmp_path, LAYER, step=1, extra={"losses": losses})
    losses.append(2.0)
    changed.set()
    made.wait()
    assert fxsplit.load_checkpoint(tmp_path, LAYER).extra == {"losses": [1.0]}


SLOW = (
    "import torch, fxsplit, time, threading, sys, multiprocessing\n"
    "from fxsplit.api.checkpoint import storage\n"
    "write = storage.write_tensors\n"
    "storage.write_tensors = lambda *args: (time.sleep(0.3), write(*args))\n"
    "def save(n): fxsplit.save_checkpoint(f'{sys.argv[1]}/{n}', torch.nn.Linear(2, 2), step=n)\n"
    "if __name__ == '__main__':\n"
)
WAYS = {
    "threads": "    for n in range(3): threading.Thread(target=save, args=(n,)).start()\n",
    "an error": "    for n in range(3): threading.Thread(target=save, args=(n,)).start()\n    raise KeyError('mine')\n",
    "a child": (
        "    for n in range(3):\n"
        "        child = multiprocessing.get_context('fork').Process(target=save, args=(n,))\n"
        "        child.start(); child.join()\n"
    ),
    "a child of a process that saves": (
        "    save(0)\n"
        "    for n in (1, 2):\n"
        "        child = multiprocessing.get_context('fork').Process(target=save, args=(n,))\n"
        "        child.start(); child.join()\n"
    ),
}


LONG = ("an error", "a child", "a child of a process that saves")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way in LONG)) for way in WAYS])
def test_the_end_of_a_process_waits_for_all_that_save(tmp_path: Path, way: str) -> None:
    done = run(SLOW + WAYS[way], str(tmp_path))
    assert ("mine" in done.error) == (way == "an error"), done.error
    assert sorted(path.parent.name for path in tmp_path.rglob("step-*")) == ["0", "1", "2"], done.error


@pytest.mark.long
def test_the_end_of_a_process_warns_of_every_save_that_failed(tmp_path: Path) -> None:
    (tmp_path / "1").touch()
    (tmp_path / "2").touch()
    done = run(SLOW + WAYS["threads"], str(tmp_path))
    assert [f"{n}/step-{n}' was not saved" in done.error for n in range(3)] == [False, True, True]


def save_often(folder: str, number: int) -> None:
    """Save one thread's own steps, and a step that all threads save."""
    big = nn.Linear(200, 200)
    for i in range(5):
        fxsplit.save_checkpoint(folder, big, step=10 * number + i).wait()
        fxsplit.save_checkpoint(folder, big, step=1000).wait()


def test_processes_that_share_a_folder_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fxsplit.api.checkpoint.checkpoint"])
    jobs = [context.Process(target=save_often, args=(os.fspath(tmp_path), number)) for number in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    found = sorted(int(path.name[5:]) for path in tmp_path.iterdir())
    assert found == sorted([10 * n + i for n in range(3) for i in range(5)] + [1000])
    for path in tmp_path.iterdir():
        fxsplit.load_checkpoint(path, nn.Linear(200, 200))


def test_copies_are_let_go_of_when_they_are_written(tmp_path: Path) -> None:
    made = fxsplit.save_checkpoint(tmp_path, LAYER, step=1)
    made.wait()
    assert made._write is None and torch.is_tensor(LAYER.weight)
