"""`fxsplit demo` with a small model and few images: its phases, its exit code, its page, and what it says of speed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fxsplit.cli import main as cli
from fxsplit.cli.demo import train
from fxsplit.cli.demo.digits import Digits
from fxsplit.cli.demo.phases import Phases
from fxsplit.cli.demo.speed import Speed


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of three layers, and images that it tells apart after an epoch: each class lights up one pixel."""

    def load() -> Digits:
        torch.manual_seed(0)
        y = torch.arange(320) % 10
        x = torch.zeros(320, 3, 4, 4)
        x.view(320, -1)[torch.arange(320), y] = 8.0
        return Digits(x[64:], y[64:], x[:64], y[:64])

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))

    monkeypatch.setattr(Digits, "load", load)
    monkeypatch.setattr(train, "make_resnet18", make_model)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second after the one before."""
    seconds: Iterator[float] = iter(map(float, range(10**6)))
    monkeypatch.setattr("fxsplit.cli.demo.phases.time.perf_counter", lambda: next(seconds))


def test_phases_add_up(clock: None, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Phases()
    shown.begin("first")
    shown.begin("first")
    shown.note("noted")
    shown.begin("second")
    shown.finish()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" s")]
    seconds = {line[:50].strip(): float(line[50:-2]) for line in lines}
    assert list(seconds) == ["first", "second", "in all"]
    assert seconds["first"] + seconds["second"] == seconds["in all"]


def test_the_demo_shows_its_phases_and_three_commands(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "demo.html"
    assert cli.main(["demo", "--report", str(page)]) == 0
    printed = capsys.readouterr().out
    names = re.findall(r"(?m)^(\S.*?) +[\d.]+ s$", printed)
    kinds = [name.partition(":")[0] for name in names]
    assert kinds[:5] == ["loading torch", "images and model", "trace and check", "profile", "plan"]
    assert kinds[5:9] == ["stages", "proof", "speed", "training"] and kinds[-2:] == ["report", "in all"]
    for part in ("bottleneck", "gradient", "predicted", "measured", "images per second", "over the goal of 95%"):
        assert part in printed, part
    commands = re.findall(r"(?m)^  .*?fxsplit (.*?) +# ", printed.partition("\nnext:\n")[2])
    assert len(commands) == 3
    for command in commands:
        assert callable(cli.make_parser().parse_args(shlex.split(command)).run)
    assert "1F1B" in page.read_text(encoding="utf-8")


def test_a_demo_that_learns_nothing_fails(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "train", lambda pipe, digits, phases: 0.1)
    assert cli.main(["demo"]) == 1
    printed = capsys.readouterr().out
    assert "test accuracy 10.00% (NOT over" in printed and "demo --report demo.html" in printed


def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--report", str(tmp_path / "nowhere" / "demo.html")]) == 2
    found = capsys.readouterr()
    assert "its folder is not there" in found.err and found.out == ""


SPEED = Speed(
    rows=64, devices=2, threads=1, cores=2, step_ms=100.0, unsplit_ms=170.0, all_threads_ms=110.0,
    predicted_ms=100.0, spread=0.02, work_ms=170.0, cpu_ms=170.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"step_ms": 109.0}, []),
        ({"step_ms": 120.0, "spread": 0.25}, []),
        ({"step_ms": 50.0}, ["-50%: the machine was busier"]),
        ({"step_ms": 200.0}, ["+100%: threads wait 100 ms"]),
        ({"step_ms": 150.0, "cpu_ms": 255.0}, ["+50%: operators compute 50% longer"]),
        ({"step_ms": 300.0, "cpu_ms": 255.0}, ["+200%: operators compute 50% longer", "threads wait 150 ms"]),
        (
            {"step_ms": 114.0, "cpu_ms": 180.2},
            ["+14%: operators compute +6% beside the profile, and threads wait 8 ms"],
        ),
        ({"step_ms": 180.0, "cores": 1}, ["+80%: 2 devices share 1 core"]),
    ],
)
def test_a_step_that_differs_has_a_reason(changes: dict[str, float], reasons: list[str]) -> None:
    speed = replace(SPEED, **changes)  # type: ignore[arg-type]  # cores are whole numbers here
    found = speed.explain()
    assert len(found) == len(reasons) and all(part in line for part, line in zip(reasons, found, strict=True)), found
    assert list(speed.show())[2:] == found
