"""`fxsplit report`: from the file of a plan, with and without its profile, and from a dump folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.cli import main as cli
from fxsplit.formats.plan_json import save_plan
from tests.report.plans import COSTS, make_plan
from tests.report.test_page import Reader, read_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    COSTS.save(tmp_path / "profile.json")
    save_plan(make_plan(), tmp_path / "plan.json")
    return tmp_path


def read(path: Path) -> str:
    return Reader(path.read_text("utf-8")).text


def test_a_plan_with_its_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "report.html"
    arguments = ["report", str(folder / "plan.json"), "--profile", str(folder / "profile.json"), "-o", str(out)]
    assert cli.main([*arguments, "--seconds", "100"]) == 0
    assert "MB; open it in a browser" in capsys.readouterr().out
    assert "One more device: step" in read(out) and "of 39.1 KiB" in read(out), "the machine is in the plan"
    saved = read_data(out.read_text("utf-8"), "plan-json")
    (folder / "again.json").write_text(json.dumps(saved))
    assert cli.main(["report", str(folder / "again.json"), "-o", str(out), "--seconds", "0"]) == 0


def test_a_plan_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder / "plan.json"), "-o", str(folder / "report.html")]) == 0
    assert "--profile FILE adds them" in capsys.readouterr().out
    assert "The plan was read without its profile" in read(folder / "report.html")


def test_another_machine_and_bandwidth(folder: Path) -> None:
    (folder / "m.toml").write_text('[[devices]]\nname = "gpu"\ncount = 2\nmemory_bytes = 80000\n')
    out = folder / "report.html"
    base = ["report", str(folder / "plan.json"), "--profile", str(folder / "profile.json"), "--seconds", "100"]
    assert cli.main([*base, "--machine", str(folder / "m.toml"), "--bandwidth", "1MB/s", "-o", str(out)]) == 0
    assert "of 78.1 KiB" in read(out) and "Twice the bandwidth: step" in read(out)
    (folder / "m.toml").write_text('[[devices]]\nname = "gpu"\ncount = 5\n')
    assert cli.main([*base, "--machine", str(folder / "m.toml"), "-o", str(out)]) == 2


def test_a_plan_of_another_graph_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((folder / "plan.json").read_text())
    data["stages"][0]["nodes"][0] = "other"
    (folder / "plan.json").write_text(json.dumps(data))
    out = folder / "report.html"
    arguments = ["report", str(folder / "plan.json"), "--profile", str(folder / "profile.json"), "-o", str(out)]
    assert cli.main(arguments) == 2
    assert "the profile is of another graph than the plan" in capsys.readouterr().err and not out.exists()


def test_a_dump_folder(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    dump = tmp_path / "dump"
    fxsplit.compile(model, ["cpu", "cpu"], example_inputs=torch.randn(8, 8), dump=dump)
    assert cli.main(["report", str(dump), "-o", str(tmp_path / "report.html"), "--seconds", "100"]) == 0
    text = read(tmp_path / "report.html")
    assert "Sequential is cut into 2 stages" in text and "of the graph added" in text
    assert "fxsplit opt" in text and "--emit-json plan" in text and "One more device: step" in text
    words = read_data((tmp_path / "report.html").read_text("utf-8"))["nodes"]["words"]
    assert any(word.startswith("Linear(in_features=8") for word in words)


def test_folders_that_are_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "report.html")
    (tmp_path / "folder").mkdir()
    assert cli.main(["report", str(tmp_path / "folder"), "-o", out]) == 2
    assert "is no dump folder" in capsys.readouterr().err
    dump = tmp_path / "dump"
    fxsplit.compile(nn.Linear(2, 2), 1, example_inputs=torch.randn(2, 2), dump=dump)
    assert cli.main(["report", str(dump), "--bandwidth", "1GB/s", "-o", out]) == 2
    assert "--bandwidth is for PLAN.json" in capsys.readouterr().err
    mark = json.loads((dump / "chain.json").read_text())
    (dump / "chain.json").write_text(json.dumps(mark | {"passes": [3]}))
    assert cli.main(["report", str(dump), "-o", out]) == 2
    assert "is damaged" in capsys.readouterr().err
    (dump / "chain.json").write_text(json.dumps(mark))
    for path in dump.glob("0[4-9]-*.ir"):
        path.unlink()
    assert cli.main(["report", str(dump), "-o", out]) == 2
    assert "has no plan" in capsys.readouterr().err and not (tmp_path / "report.html").exists()


def test_wrong_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(folder / "plan.json")
    assert cli.main(["report", plan, "-o", str(folder / "x" / "r.html")]) == 2
    assert cli.main(["report", plan, "-o", str(folder / "r.html"), "--seconds", "-1"]) == 2
    assert "give 0 to 3600 seconds" in capsys.readouterr().err
    assert cli.main(["report", str(folder / "nowhere.json"), "-o", str(folder / "r.html")]) == 2
    with pytest.raises(SystemExit):
        cli.main(["report", plan])
