"""Observers by themselves, without a compile."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch import fx

from fxsplit.errors import FileError, FxsplitWarning
from fxsplit.ir import dump
from fxsplit.ir.chain import Chain
from fxsplit.ir.dump import DumpTo, make_observers
from fxsplit.ir.dump_folder import DumpFolder, mark_folder
from fxsplit.ir.graph import IR
from fxsplit.ir.manager import run_chain
from fxsplit.ir.observers import Printer
from fxsplit.ir.text.write import render


def small_ir() -> IR:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    return IR(fx.GraphModule({}, graph))


def rename_graph(ir: IR) -> IR:
    return ir


def test_files_are_numbered_from_zero_in_each_chain(tmp_path: Path) -> None:
    observer = DumpTo(tmp_path / "a" / "b", "rename-graph,rename-graph")
    for _ in range(2):
        run_chain(small_ir(), [rename_graph, rename_graph], [observer])
        assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
            "00-trace.ir",
            "01-rename-graph.ir",
            "02-rename-graph.ir",
            "chain.json",
        ]
    assert (tmp_path / "a" / "b" / "00-trace.ir").read_text() == render(small_ir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="a file has that name; give another path"):
        DumpTo(tmp_path / "file").start(small_ir())


def test_a_dump_that_fails_throws_away_no_measurement(tmp_path: Path) -> None:
    """A failure to write a later file used to be a bare OSError, and ended the compile."""

    def block(ir: IR) -> IR:
        (tmp_path / "01-block.ir").mkdir()
        return ir

    with pytest.warns(FxsplitWarning, match="dump lacks the IR after pass 'block'"):
        ir = run_chain(small_ir(), [block, rename_graph], [DumpTo(tmp_path)])
    assert len(ir.steps) == 2 and (tmp_path / "02-rename-graph.ir").is_file()
    (tmp_path / "blocked" / "00-trace.ir").mkdir(parents=True)
    mark_folder(tmp_path / "blocked", {})
    with pytest.raises(FileError, match=r"00-trace.ir"):
        DumpTo(tmp_path / "blocked").start(small_ir())


def test_dumps_at_once_do_not_mix(tmp_path: Path) -> None:
    """Two compiles in threads or processes used to mix their files in one folder."""
    first, second = DumpTo(tmp_path), DumpTo(tmp_path)
    ir = small_ir()
    first.start(ir)
    second.start(ir)
    second.after("fold", ir)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with pytest.warns(FxsplitWarning, match="ends here, as another compile dumps there by now") as caught:
        first.after("cut", ir)
        first.after("emit", ir)
        first.failed("emit", ir, ValueError("no"))
    assert len(caught) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_folders_of_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread took the file that another was just writing for a file of the user's."""
    monkeypatch.setenv("FXSPLIT_DUMP", str(tmp_path / "ir"))
    errors: list[BaseException] = []

    def dump_one() -> None:
        try:
            folder = DumpFolder(None).choose("Net", "train", [])
            assert folder is not None
            run_chain(small_ir(), [rename_graph], [DumpTo(folder)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=dump_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    marks = sorted(path.parent.name for path in tmp_path.rglob("chain.json"))
    assert marks == sorted(["ir", "Net", *(f"Net-{n}" for n in range(2, 8))])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("name", ["chain.json", "00-trace.ir", "07-mine.ir"])
def test_a_pipe_in_the_way_is_refused(name: str, tmp_path: Path) -> None:
    """The compile waited for ever for somebody to read or write it."""
    if name != "chain.json":
        mark_folder(tmp_path, {})
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileError, match=name):
        DumpTo(tmp_path).start(small_ir())


@pytest.mark.parametrize(
    ("names", "told"),
    [(("trace",), ["trace"]), (("fold",), ["fold"]), (("all",), ["trace", "fold", "cut"]), ((), [])],
)
def test_what_is_asked_for_is_printed(names: tuple[str, ...], told: list[str]) -> None:
    file = io.StringIO()
    observer, ir = Printer(after_passes=names, file=file), small_ir()
    observer.start(ir)
    observer.after("fold", ir)
    observer.after("cut", ir)
    assert file.getvalue() == "".join(f"; after {name}\n{render(ir)}\n" for name in told)


def test_what_is_asked_for_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXSPLIT_PRINT_AFTER", raising=False)
    chain = Chain((rename_graph,))
    assert make_observers(None, chain) == [] and make_observers(Path("a"), chain) == [DumpTo(Path("a"), str(chain))]
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", " rename-graph, all ,")
    assert make_observers(None, chain) == [Printer(after_passes=("rename-graph", "all"))]


def test_a_name_to_print_after_may_be_of_another_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pipeline without this pass used to be refused; now a misspelt name gives one warning."""
    monkeypatch.setenv("FXSPLIT_PRINT_AFTER", "trace,fold")
    monkeypatch.setattr(dump, "_unmatched", set())
    with pytest.warns(FxsplitWarning, match="nothing is printed after 'fold', which FXSPLIT_PRINT_AFTER names: this"):
        make_observers(None, Chain((rename_graph,)))
    assert make_observers(None, Chain((rename_graph,))) == [Printer(after_passes=("trace", "fold"))]


PROGRAM = """
import torch, fxsplit
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
fxsplit.compile(model, 1, example_inputs=torch.randn(4, 4))
"""


def trace(folder: Path) -> Path:
    """Return the file of torch's structured trace of a program that compiles a pipeline."""
    environment = os.environ | {"TORCH_TRACE": str(folder)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=240)
    (file,) = folder.iterdir()
    return file


def test_passes_are_artifacts_of_torchs_trace(tmp_path: Path) -> None:
    lines = trace(tmp_path / "trace").read_text().splitlines()
    records = [json.loads(line.split("] ", 1)[-1]) for line in lines if '"fxsplit_' in line]
    names = ["trace", "profile", "augment", "order", "partition", "schedule", "emit", "batch-norm"]
    assert [r["artifact"]["name"] for r in records] == [f"fxsplit_{i:02d}_{name}" for i, name in enumerate(names)]
    assert "\tfact Plan {" in lines


@pytest.mark.long
def test_tlparse_shows_the_passes(tmp_path: Path) -> None:
    tlparse = shutil.which("tlparse", path=str(Path(sys.executable).parent))
    if tlparse is None:
        pytest.skip("needs tlparse, which `make test-long` installs")
    command = [tlparse, str(trace(tmp_path / "trace")), "-o", str(tmp_path / "page"), "--no-browser"]
    subprocess.run(command, check=True, timeout=60)
    (plan,) = (tmp_path / "page").glob("*/fxsplit_04_partition_*.txt")
    assert "\nfact Plan {" in plan.read_text()
    assert plan.name in (tmp_path / "page" / "index.html").read_text()
