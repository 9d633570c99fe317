"""`fxsplit allocate`: the contract that other programs rely on, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxsplit.cli import main as cli

JOBS = """
horizon_s = 60
[[jobs]]
name = "a"
curve = [1.0, 1.0, 4.0, 4.0]
up_s = 10
[[jobs]]
name = "b=c"
curve = [2.0, 3.0]
down_s = 5
"""


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.toml"
    path.write_text(JOBS)
    return str(path)


@pytest.fixture
def events(tmp_path: Path) -> str:
    path = tmp_path / "events.csv"
    path.write_text("time_s,devices\n0,4\n100,2\n200,5\n400,5\n")
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.main(["allocate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_allocation_for_programs(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, jobs, "--devices", "4", "--current", "a=1,b=c=2")
    assert found["counts"] == {"a": 3, "b=c": 1}
    assert found["objective"] == 60 * 4 - 10 + 60 * 2 - 5 * 3
    assert found["jobs"]["a"] == {
        "devices": 3,
        "gain": 230.0,
        "samples_per_s": 4.0,
        "why_no_more": "more devices bring no more",
        "curve": [1.0, 1.0, 4.0, 4.0],
    }
    shared = answer(capsys, jobs, "--devices", "4", "--objective", "share")
    assert shared["counts"] == {"a": 3, "b=c": 1} and shared["objective"] == pytest.approx(2 / 3)


def test_a_replay_for_programs(jobs: str, events: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, jobs, "--replay", events)
    assert list(found["policies"]) == ["exact", "equal", "first-come", "greedy"]
    assert found["n_events"] == 4 and found["mean_devices"] == 4.0
    for one in found["policies"].values():
        assert one["utilisation"] + sum(one["losses"].values()) == pytest.approx(1.0)
        assert one["weighted_samples"] == pytest.approx(one["utilisation"] * found["dedicated_samples_per_s"] * 400)
    picture = tmp_path / "u.svg"
    assert cli.main(["allocate", jobs, "--replay", events, "--seed", "3", "--picture", str(picture), "--dark"]) == 0
    table = capsys.readouterr().out
    assert "concavity" in table and "4 events in 0.1 h, 4.0 devices idle on average" in table
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --devices N, the devices to share, or --replay CSV"),
        (["--devices", "4", "--current", "a"], "--current a: give each job once with its number of devices"),
        (["--devices", "4", "--current", "a=1,a=2"], "--current a=2: give each job once"),
        (["--devices", "4", "--current", "a=x"], "--current a=x: give each job once"),
        (["--devices", "4", "--current", "d=1"], "current names the job 'd': the jobs are a, b=c"),
        (["--devices", "4", "--current", "a=3,b=c=2"], "current has 5 devices in all, and there are 4"),
        (["--devices", "-1"], "n_devices=-1: give a number of devices"),
        (["--devices", "4", "--seed", "1"], "--seed 1: it is for --replay"),
        (["--devices", "4", "--picture", "u.svg"], "--picture u.svg: it is for --replay"),
        (["--devices", "4", "--replay", "e.csv"], "--devices 4: --replay takes devices from its file, so leave it out"),
        (["--objective", "share", "--replay", "e.csv"], "--objective share: --replay takes"),
        (["--replay", "none.csv"], "cannot read events from 'none.csv'"),
    ],
)
def test_what_is_wrong_is_named(
    jobs: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["allocate", jobs, *arguments]) == 2
    assert f"fxsplit allocate: {message}" in capsys.readouterr().err
