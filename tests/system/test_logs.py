"""Records of compiles, plans, checkpoints and faults reach the handlers, the console and the JSON lines."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import FileError, FxsplitWarning, InputError
from fxsplit.system.logs import LOGGERS, apply_settings, emit, parse_levels, read_environment
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
    forward, failed, compiled = read(tmp_path)
    assert (forward["event"], forward["level"], forward["logger"]) == (
        "forward_failed",
        "ERROR",
        "fxsplit.runtime.faults",
    )
    assert "has failed: StageError: index out of range in self (in stage 0 of 1" in forward["message"]
    assert failed["event"] == "pass_failed"
    assert failed["message"] == "in pass 'refuse' (1 of 2) on Mlp in train mode: ValueError: no such graph"
    assert compiled["event"] == "compile_for_failed"


def test_a_hook_that_fails_in_a_step_or_backward_is_a_fault(tmp_path: Path) -> None:
    apply_settings({"faults": logging.ERROR}, tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with fxsplit.compile(model, 2, example_inputs=x, loss_fn=nn.functional.mse_loss, passes=FAST) as pipe:
        next(model.parameters()).register_hook(lambda gradient: gradient + 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe.step(x, target=x)
        model[1].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe(x).sum().backward()
    events = [line["event"] for line in read(tmp_path)]
    assert events[0] == "step_failed"
    assert events[1] == "backward_failed"


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
        assert fault["failed_rank"] == 1
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


def test_settings_and_the_programs_own_handlers_do_not_touch_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, logger = logging.FileHandler(tmp_path / "own.log"), logging.getLogger("fxsplit")
    logger.addHandler(own)
    logger.setLevel(logging.WARNING)
    try:
        apply_settings({"plan": logging.INFO})
        emit("plan", "plan", "shown")
        emit("passes", "pass", "not shown")
        emit("plan", "no_plan", "both", level=logging.WARNING)
        logging.config.dictConfig({"version": 1})  # it disables all loggers
        emit("plan", "plan", "shown too")
        assert logger.level == logging.WARNING
    finally:
        logger.removeHandler(own)
        logger.setLevel(logging.NOTSET)
        for name in LOGGERS.values():
            logging.getLogger(name).disabled = False
        own.close()
    assert [line.split("] ")[-1] for line in capsys.readouterr().err.splitlines()] == ["shown", "both", "shown too"]
    assert (tmp_path / "own.log").read_text() == "both\n"


def test_a_program_sees_records_through_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fxsplit"):
        emit("plan", "plan", "2 stages", bottleneck_ms=1.5)
    (record,) = caplog.records
    assert record.__dict__["fxsplit"] == {"bottleneck_ms": 1.5, "event": "plan"}
    assert record.filename == "test_logs.py"


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=r"no logs called 'plans': give names of all, system.*did you mean 'plan'"):
        parse_levels("passes,plans")


@pytest.mark.parametrize("wrong", ["plans", "++plan"])
def test_a_wrong_setting_of_the_environment_is_a_warning(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSPLIT_LOGS", wrong)
    with pytest.warns(FxsplitWarning, match=r"no logs are shown: FXSPLIT_LOGS='.*'.*there are no logs called"):
        read_environment()
    emit("plan", "plan", "2 stages")


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


class Unsayable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def refuse(record: logging.LogRecord) -> bool:
    raise OSError("the collector is down")


def test_no_error_of_logging_reaches_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    logger, factory = logging.getLogger("fxsplit"), logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = factory(*args, **kwargs)
        record.fxsplit = None
        return record

    logger.setLevel(logging.INFO)
    try:
        logging.getLogger(LOGGERS["plan"]).addFilter(refuse)
        emit("plan", "plan", "2 stages")
        logging.setLogRecordFactory(make)
        emit("passes", "pass", "partition")
    finally:
        logging.setLogRecordFactory(factory)
        logging.getLogger(LOGGERS["plan"]).removeFilter(refuse)
        logger.setLevel(logging.NOTSET)
    said = capsys.readouterr().err
    assert "OSError: the collector is down" in said
    assert "Attempt to overwrite" in said


def test_an_error_without_a_text_is_named(tmp_path: Path) -> None:
    apply_settings({}, tmp_path)
    emit("faults", "step_failed", "the step has failed", error=Unsayable())
    (line,) = read(tmp_path)
    assert line["message"] == "the step has failed: Unsayable (its text raises RuntimeError)"


def test_a_closed_standard_error_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_settings({"all": logging.INFO})
    for stream in (None, open(os.devnull, "w")):  # noqa: SIM115
        if stream is not None:
            stream.close()
        monkeypatch.setattr(sys, "stderr", stream)
        emit("plan", "plan", "2 stages")


def test_lines_are_json_also_for_odd_figures_and_after_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_settings({}, tmp_path)
    emit("plan", "plan", "2 stages", gap=float("nan"), noted={"best": float("inf")}, rank="?", time="?")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, content: write(file, content[:10]))
        emit("plan", "plan", "cut off")
    emit("plan", "plan", "whole")
    first, cut, last = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    assert len(cut) == 10
    assert json.loads(last)["message"] == "whole"
    found = json.loads(first)
    assert (found["gap"], found["noted"], found["rank"]) == (None, {"best": None}, 0)
    assert found["time"] > 0
