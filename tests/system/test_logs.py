"""Records of compiles, plans, checkpoints and faults reach the handlers, the console and the JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import FileError, FxsplitWarning, InputError
from fxsplit.system.logs import LOGGERS, Console, JsonLines, apply_settings, emit, parse_levels, read_environment
from tests.support.models import FAST, Mlp
from tests.support.ranks import ranks


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """Take the settings of a test away."""
    yield
    apply_settings({})


def read(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


class Shift(nn.Module):
    """Reads a Python number that becomes a part of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.by = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = self.layer(x) + len("a" * int(self.by))
        return shifted


def test_each_event_of_a_pipelines_life_is_a_record(tmp_path: Path) -> None:
    apply_settings({}, tmp_path / "logs")
    model = Shift()
    with fxsplit.compile(model, 2, example_inputs=torch.randn(4, 4), passes=FAST) as pipe:
        model.by = 2.0
        with pytest.warns(FxsplitWarning, match="compiling again"):
            pipe(torch.randn(4, 4))
        fxsplit.save_checkpoint(tmp_path / "saved", pipe, step=3).wait()
        fxsplit.load_checkpoint(tmp_path / "saved", pipe)
    lines = read(tmp_path / "logs")
    assert {line["rank"] for line in lines} == {0}
    assert {line["level"] for line in lines} <= {"INFO", "ERROR"}
    passes = [line for line in lines if line["event"] == "pass"]
    assert [line["step"] for line in passes][:2] == ["profile{repeats=1}", "augment"]
    assert passes[0]["facts"][0] == "Costs"
    assert passes[0]["n_nodes"] == len(pipe.traced.gm.graph.nodes)
    assert {line["logger"] for line in passes} == {"fxsplit.ir.passes"}
    plans = [line for line in lines if line["event"] == "plan"]
    assert plans[-1]["bottleneck_ms"] == pipe.plan.bottleneck_ms
    assert plans[-1]["n_stages"] == 2
    assert next(line["reason"] for line in lines if line["event"] == "compile") is None
    (again,) = [line for line in lines if line["event"] == "recompile"]
    assert again["reason"] == "attribute 'by' of the model changed from 1.0 to 2.0"
    saved, loaded = [line for line in lines if line["logger"] == "fxsplit.api.checkpoints"]
    assert saved["event"] == "saved"
    assert saved["path"] == loaded["path"] == str(tmp_path / "saved" / "step-3")
    assert loaded["step"] == 3
    phases = [line for line in lines if line["event"] == "phase"]
    assert any(line["phase"].startswith("capturing Shift") for line in phases)
    assert all(line["seconds"] >= 0.0 and not line["failed"] for line in phases)


def test_failures_are_errors(tmp_path: Path) -> None:
    apply_settings({"all": logging.ERROR}, tmp_path)

    with (
        fxsplit.compile(nn.Embedding(4, 4), 1, example_inputs=torch.zeros(4, dtype=torch.long), passes=FAST) as pipe,
        pytest.raises(IndexError),
    ):
        pipe(torch.full((4,), 9))

    def refuse(ir: fxsplit.IR) -> fxsplit.IR:
        raise ValueError("no such graph")

    with pytest.raises(ValueError, match="no such graph"):
        fxsplit.compile(Mlp(), 1, example_inputs=torch.randn(8, 8), passes=[refuse])
    job, failed = read(tmp_path)
    assert (job["event"], job["level"], job["logger"]) == ("job_failed", "ERROR", "fxsplit.runtime.faults")
    assert job["message"].startswith("StageError: index out of range in self (in stage 0 of 1")
    assert failed["event"] == "pass_failed"
    assert failed["message"].startswith("ValueError: no such graph in pass 'refuse' (1 of 2) on Mlp")


def fail_on_the_second(rank: int, n: int, folder: str) -> None:
    apply_settings({}, folder)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, "world", example_inputs=torch.randn(4, 4), passes=FAST)
    if rank == 1:
        pipe.stages[1].module.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe(torch.randn(4, 4))
    pipe.close()


def test_each_rank_writes_a_file_of_its_own(tmp_path: Path) -> None:
    ranks(2, fail_on_the_second, str(tmp_path))
    for rank in (0, 1):
        lines = read(tmp_path, rank)
        assert {line["rank"] for line in lines} == {rank}
        (fault,) = [line for line in lines if line["event"] == "rank_failed"]
        assert fault["error_rank"] == 1
        assert "ZeroDivisionError" in fault["message"]


def test_a_process_of_a_launcher_has_its_rank_before_it_meets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    apply_settings({"plan": logging.INFO}, tmp_path)
    emit("plan", "plan", "2 stages", odd=nn.ReLU())
    (line,) = read(tmp_path, 3)
    assert (line["message"], line["odd"], line["logger"]) == ("2 stages", "ReLU()", "fxsplit.planner.plan")


def test_nothing_is_shown_unless_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    emit("faults", "job_failed", "ValueError", level=logging.ERROR)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("all", ["plan", "detail of faults", "passes"]),
        ("plan", ["plan"]),
        ("planner", ["plan"]),
        ("+runtime", ["detail of faults"]),
        ("all,-plan", ["passes"]),
        ("-all, +faults", ["detail of faults"]),
        ("recompiles", []),
    ],
)
def test_settings_choose_records(setting: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    apply_settings(parse_levels(setting))
    emit("plan", "plan", "plan")
    emit("faults", "job_failed", "detail of faults", level=logging.DEBUG if "+" in setting else logging.INFO)
    emit("passes", "pass", "passes")
    lines = capsys.readouterr().err.splitlines()
    if setting == "all,-plan":
        shown = ["detail of faults", "passes"]
    assert [line.split("] ")[-1] for line in lines] == shown
    assert all(" INFO [fxsplit." in line or " DEBUG [fxsplit." in line for line in lines)


def test_a_later_setting_replaces_the_earlier_one(capsys: pytest.CaptureFixture[str]) -> None:
    apply_settings({"all": logging.DEBUG})
    apply_settings({"plan": logging.INFO})
    emit("plan", "plan", "once")
    emit("passes", "pass", "never")
    assert capsys.readouterr().err.count("\n") == 1
    assert logging.getLogger("fxsplit").level == logging.NOTSET


def test_a_record_is_printed_once_if_the_program_prints_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    apply_settings({"plan": logging.INFO})
    own, root = logging.StreamHandler(sys.stderr), logging.getLogger()
    root.addHandler(own)
    try:
        emit("plan", "plan", "once")
        own.setLevel(logging.ERROR)
        emit("plan", "plan", "by fxsplit")
    finally:
        root.removeHandler(own)
    assert [line.split("] ")[-1] for line in capsys.readouterr().err.splitlines()] == ["once", "by fxsplit"]


def test_a_program_sees_records_through_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fxsplit"):
        emit("plan", "plan", "2 stages", bottleneck_ms=1.5)
    (record,) = caplog.records
    assert record.__dict__["bottleneck_ms"] == 1.5
    assert record.filename == "test_logs.py"


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=r"no logs called 'plans': give names of all, system.*did you mean 'plan'"):
        parse_levels("passes,plans")


@pytest.mark.parametrize("wrong", ["plans", "++plan"])
def test_a_wrong_setting_of_the_environment_is_a_warning(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSPLIT_LOGS", wrong)
    with pytest.warns(FxsplitWarning, match=r"no logs are shown: FXSPLIT_LOGS='.*'.*there are no logs called"):
        read_environment()
    assert not [h for h in logging.getLogger("fxsplit").handlers if isinstance(h, (Console, JsonLines))]


def test_the_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FXSPLIT_LOGS", "plan")
    monkeypatch.setenv("FXSPLIT_LOGS_JSON", "logs")
    monkeypatch.chdir(tmp_path)
    read_environment()
    monkeypatch.chdir("/")
    emit("plan", "plan", "2 stages")
    assert capsys.readouterr().err.endswith(" INFO [fxsplit.planner.plan] 2 stages\n")
    assert [line["message"] for line in read(tmp_path / "logs")] == ["2 stages"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make the folder"):
        apply_settings({}, tmp_path / "file")


def test_a_line_that_cannot_be_written_does_not_stop_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply_settings({}, tmp_path)
    (tmp_path / "rank-0.jsonl").mkdir()
    emit("plan", "plan", "2 stages")
    assert "IsADirectoryError" in capsys.readouterr().err


def test_each_kind_of_record_is_in_a_room() -> None:
    """A logger is named after the room whose code makes the record."""
    rooms = {name.split(".")[1] for name in LOGGERS.values() if "." in name}
    assert all((Path(fxsplit.__file__).parent / room).is_dir() for room in rooms)
