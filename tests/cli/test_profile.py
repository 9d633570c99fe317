"""`fxsplit profile`: the file that it writes is the one that `fxsplit plan` reads, and errors come before the work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import fxsplit
from fxsplit.cli.main import main
from fxsplit.formats import read
from fxsplit.ir.facts.costs.costs import InputCost, NodeCost
from fxsplit.ir.facts.costs.estimated import Estimated, list_doubts
from tests.support.refusals import full_disk

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, scale):
        return self.b(torch.tanh(self.a(x)) * scale)


def named():
    return Net(), (torch.randn(16, 8),), {"scale": torch.ones(16, 16)}


def labelled():
    return Net(), (torch.randn(16, 8),), {"scale": torch.ones(16, 16)}, torch.zeros(16)


def missing():
    return Net(), torch.randn(16, 8)


def wrong():
    return nn.Linear(4, 8), torch.randn(16, 8)


def made():
    raise AssertionError("the model was made before the file was looked at")
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own module, in the current folder."""
    (tmp_path / "profiled_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "profiled_models", raising=False)


@pytest.mark.parametrize(("factory", "count", "rows"), [("named", 4, 4), ("labelled", 3, 6), ("named", 1, 16)])
def test_the_file_is_the_profile_of_a_microbatch(
    capsys: pytest.CaptureFixture[str], factory: str, count: int, rows: int
) -> None:
    options = ["--n-microbatches", str(count)] if count > 1 else []
    assert main(["profile", f"profiled_models:{factory}", *options, "-o", "net.json"]) == 0
    assert capsys.readouterr().out.startswith(f"net.json: 4 nodes, {rows} rows, ")
    costs = read("net.json").costs
    assert costs.rows == rows and not costs.inference and [n.name for n in costs.nodes] == ["a", "tanh", "mul", "b"]
    assert costs.by_name["b"].output_bytes == 4 * 3 * rows
    assert main(["plan", "net.json", "--devices", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == rows and [name for stage in found["stages"] for name in stage["nodes"]] == list(
        costs.by_name
    )


def test_the_options_are_those_of_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, object] = {}

    def listen(model: object, inputs: object, **options: object) -> fxsplit.Costs:
        told.update(options)
        return measure(model, inputs, **options)  # type: ignore[arg-type]

    measure = fxsplit.profile
    monkeypatch.setattr("fxsplit.api.profile.profile", listen)
    options = ["--inference", "--repeats", "2", "--device", "cpu", "--n-microbatches", "2"]
    assert main(["profile", "profiled_models:named", *options, "--output", "net.json"]) == 0
    told = {name: value for name, value in told.items() if value}
    assert told == {"inference": True, "repeats": 2, "device": "cpu", "n_microbatches": 2}
    assert read("net.json").costs.inference


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("named", ["--n-microbatches", "0"], "fxsplit profile: --n-microbatches 0: give a number of at least 1"),
        ("named", ["--n-microbatches", "17"], "a batch of 16 rows cannot be cut into --n-microbatches 17"),
        ("named", ["--repeats", "0"], "--repeats 0: give a number of at least 1"),
        ("named", ["--device", "nowhere"], "nowhere"),
        ("missing", [], "scale"),
        ("wrong", [], "mat1 and mat2 shapes cannot be multiplied"),
        ("nobody", [], "has no 'nobody'"),
        ("made", ["-o", "none/net.json"], "cannot write 'none/net.json'"),
        ("made", ["-o", "."], "it is a folder: give the name of a file"),
    ],
)
def test_bad_input_leaves_the_file_as_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, factory: str, options: list[str], message: str
) -> None:
    (tmp_path / "net.json").write_text("old")
    assert main(["profile", f"profiled_models:{factory}", "-o", "net.json", *options]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said
    assert (tmp_path / "net.json").read_text() == "old"


def test_a_full_disk_leaves_the_file_as_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text("old")
    with full_disk():
        assert main(["profile", "profiled_models:named", "-o", "net.json"]) == 2
    assert "make room; nothing was changed there" in capsys.readouterr().err
    assert (tmp_path / "net.json").read_text() == "old" and not list(tmp_path.glob(".fxsplit-*"))


def test_a_noisy_measurement_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxsplit.Costs, "noise", "the times vary")
    assert main(["profile", "profiled_models:named", "-o", "net.json"]) == 0
    assert "note: the times vary" in capsys.readouterr().err


def test_an_estimate_is_told_by_each_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--on", "h100", "--dtype", "bfloat16", "--compiled"]
    assert main(["profile", "profiled_models:named", "-o", "net.json", *options]) == 0
    said = "estimated for h100, not measured (bfloat16, table"
    told = capsys.readouterr().out
    assert said in told and "fused by torch.compile as guessed" in told
    assert "compared with no measurement on this device" in told
    for command in (["plan"], ["plan", "--devices", "1..2"], ["explain"], ["simulate"]):
        assert main([command[0], "net.json", *command[1:]]) == 0
        told = capsys.readouterr().out
        assert said in told, command
        assert "optimal" not in told or "optimal for estimated times" in told
    assert main(["plan", "net.json", "--json"]) == 0
    plan = capsys.readouterr().out
    assert json.loads(plan)["estimated"]["device"] == "h100" and json.loads(plan)["optimal"] is True
    (tmp_path / "plan.json").write_text(plan)
    assert main(["simulate", "--plan", "plan.json", "--json", "--picture", "step.svg"]) == 0
    assert json.loads(capsys.readouterr().out)["estimated"]["dtype"] == "bfloat16"
    assert "estimated for h100, not measured" in (tmp_path / "step.svg").read_text()
    assert main(["report", "plan.json", "-o", "page.html"]) == 0
    assert "estimated for h100, not measured" in (tmp_path / "page.html").read_text()
    assert main(["plan", "net.json", "--picture", "plan.svg"]) == 0
    assert "optimal for estimated times" in (tmp_path / "plan.svg").read_text()


def test_a_plan_from_estimates_says_how_sure_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The cut lies in the middle of 5 + 1 | 1 + 5, and moves one node if the first node has another time."""
    times = {"a": (5.0, "pointwise"), "b": (1.0, "matmul"), "c": (1.0, "matmul"), "d": (5.0, "matmul")}
    nodes = [
        NodeCost(name, name, "", name, (before,), ms, 0.0, 8, 8, 8, 0, 0, weight_ms=0.0, kind=kind)
        for (name, (ms, kind)), before in zip(times.items(), ("x", "a", "b", "c"), strict=True)
    ]
    estimated = Estimated("h100", "2026-11", "float16")
    costs = fxsplit.Costs(tuple(nodes), (InputCost("x", 8, 0),), ("d",), rows=1, estimated=estimated)
    costs.save("net.json")
    assert main(["plan", "net.json", "--devices", "2", "--no-traffic"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    table = told.partition("planned again with each class of operators 0.7 and 1.4 times as slow: ")[2]
    products, first = table.partition("matmul")[2].split("pointwise")
    # The slowest stage of the plan is compared with that of the best one: 5.7 with 5, and 8.4 with 7.8.
    assert "58 %" in products and "14.0 % better" in products and "7.7 % better" in products
    # Here 6 with 5.5, and 8 with 7.
    assert "42 %" in first and "9.1 % better" in first and "14.3 % better" in first
    measured = dataclasses.replace(costs, estimated=None)
    measured.save("net.json")
    assert main(["plan", "net.json", "--devices", "2"]) == 0
    assert "planned again" not in capsys.readouterr().out


def test_doubts_are_told_with_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def make(kind: str, ms: float) -> fxsplit.Costs:
        node = NodeCost("a", "a", "", "a", ("x",), ms, ms, 8, 8, 8, 0, 0, kind=kind)
        return fxsplit.Costs((node,), (InputCost("x", 8, 0),), ("a",), estimated=Estimated("h100", "t", "float16"))

    assert "convolutions take 100 %" in next(list_doubts(make("convolution", 1.0)))
    assert "operators under 0.1 ms take 100 %" in next(list_doubts(make("matmul", 0.05)))
    assert list(list_doubts(make("matmul", 1.0))) == []
    assert list(list_doubts(dataclasses.replace(make("convolution", 0.01), estimated=None))) == []
    make("matmul", 0.05).save("net.json")
    assert main(["plan", "net.json", "--devices", "1"]) == 0
    assert "note: operators under 0.1 ms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "h1000"], "unknown device 'h1000': known are v100"),
        (["--on", "t4", "--dtype", "bfloat16"], "device 't4' does not compute in bfloat16: it has float32, float16"),
        (["--on", "h100", "--dtype", "half"], "--dtype half: give one of float64"),
        (["--dtype", "float16"], "--dtype float16 is for estimates: give --on too"),
    ],
)
def test_a_wrong_device_or_dtype_is_named(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["profile", "profiled_models:named", "-o", "net.json", *options]) == 2
    assert message in capsys.readouterr().err
