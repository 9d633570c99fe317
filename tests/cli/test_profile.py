"""`fxsplit profile`: the file that it writes is the one that `fxsplit plan` reads, and errors come before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fxsplit
from fxsplit.cli.main import main
from fxsplit.formats import read
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
