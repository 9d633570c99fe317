"""examples/: each script and the notebook run, and print what they are for."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit
from fxsplit.cli.main import main as run_command
from fxsplit.torch_internals.torchvision_operators import declare_detection_operators
from tests.support import notebooks
from tests.support.times import state_times

FOLDER = Path(__file__).parents[2] / "examples"
ELSEWHERE = ["train_digits.py"]  # started as processes, by test_train_digits.py


@pytest.fixture
def small_weights_count() -> None:
    """Keep the limit that users have: weights of examples are too small for a backward in two halves."""


def run(name: str, *options: str) -> dict[str, Any]:
    """Run an example as a script, and return its names."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *options])
        return runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_every_example_is_run_and_named_by_the_docs() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    docs = "".join(page.read_text(encoding="utf-8") for page in (FOLDER.parent / "docs").rglob("*.md"))
    scripts = [path for kind in ("*.py", "*.ipynb") for path in FOLDER.rglob(kind)]
    assert len(scripts) >= 8
    for path in scripts:
        name = path.relative_to(FOLDER).as_posix()
        assert f'"{name}"' in text, f"no test runs {name}"
        assert path.name in docs, f"no page names {name}"


def test_a_network_on_images_is_as_accurate_as_its_unsplit_twin(capsys: pytest.CaptureFixture[str]) -> None:
    run("train_cnn.py")
    found = re.findall(r"accuracy ([\d.]+)% as a pipeline, ([\d.]+)% unsplit", capsys.readouterr().out)
    assert len(found) == 5
    mine, unsplit = map(float, found[-1])
    # Sums in another order round otherwise: one of 360 images may change sides.
    assert mine == pytest.approx(unsplit, abs=0.6) and mine > 95


@pytest.mark.long
@pytest.mark.companions
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_of_hugging_face_is_fine_tuned_by_hand_and_with_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    declare_detection_operators()  # transformers imports torchvision if it is installed
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name)
    run("fine_tune.py")
    found = re.findall(r"(by hand|with Trainer): accuracy ([\d.]+)% .*?, ([\d.]+)% read back", capsys.readouterr().out)
    assert [way for way, *_ in found] == ["by hand", "with Trainer"]
    for _, accuracy, read_back in found:
        assert float(accuracy) == pytest.approx(float(read_back), abs=0.5) and float(accuracy) > 85


def test_a_model_larger_than_a_device_trains_on_eight(capsys: pytest.CaptureFixture[str]) -> None:
    run("too_big.py")
    printed = capsys.readouterr().out
    assert "one device: no plan fits in memory" in printed
    found = re.search(r"loss ([\d.]+), unsplit ([\d.]+); the weights differ by at most (\S+)", printed)
    assert found is not None and float(found[1]) == pytest.approx(float(found[2]), abs=1e-5) and float(found[3]) < 1e-3
    held = [float(size) for size in re.findall(r"([\d.]+) MiB$", printed, re.MULTILINE)]
    assert len(held) == 8 and max(held) * 2**20 <= 2e6 + 2**20 / 20, "a plan that does not fit"


def test_a_cluster_is_planned_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script, and then the commands of its docstring."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machine.toml").write_text((FOLDER / "cluster" / "machine.toml").read_text())
    example = run("cluster/measure.py", "--layers", "4", "--width", "64")
    assert "nodes of a model of" in capsys.readouterr().out
    lines = [line.split("#")[0].split() for line in example["__doc__"].splitlines() if "    fxsplit " in line]
    assert [line[1] for line in lines] == ["plan", "plan", "simulate", "report"]
    for words in lines:
        target = words[words.index(">") + 1] if ">" in words else None
        assert run_command(words[1 : -2 if target else None]) == 0
        printed = capsys.readouterr().out
        if target:
            Path(target).write_text(printed)
    plan = json.loads(Path("plan.json").read_text())
    used = [name for stage in plan["stages"] for name in stage["devices"]]
    assert used == [f"{host}.{number}" for host in "ab" for number in range(4)]
    assert Path("report.html").read_text().startswith("<!doctype html>")


def test_the_notebook_shows_what_its_cells_give() -> None:
    cells = notebooks.run_cells(FOLDER / "first_pipeline.ipynb")
    assert sum(map(notebooks.varies, (cell for cell, _ in cells))) < len(cells) / 2
    for number, (cell, outputs) in enumerate(cells, 1):
        assert cell["execution_count"] == number
        if not notebooks.varies(cell):
            assert outputs == cell["outputs"], f"cell {number}: run python -m tests.support.notebooks"
        kinds, stored = (
            [[each["output_type"], *sorted(each.get("data", ()))] for each in some]
            for some in (outputs, cell["outputs"])
        )
        assert kinds == stored


def test_the_operations_and_bytes_of_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    state_times(_0=4.0)
    run("passes/intensity.py")
    # A convolution of 4 rows multiplies and adds 3 x 3 x 3 numbers for each of 16 x 30 x 30 outputs of a row.
    convolution = 2 * 4 * 16 * 30 * 30 * 27
    linear = 2 * 4 * (16 * 30 * 30 * 64 + 64 * 10)
    image, middle = 4 * 3 * 32 * 32, 4 * 16 * 30 * 30
    moved = 4 * (image + 16 * 27 + 16 + middle)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        f"stage 0: {convolution:,} operations, {moved:,} bytes, {convolution / moved:.1f} for each byte"
    )
    assert printed[1].startswith(f"stage 1: {linear:,} operations")


def test_a_fused_batch_norm_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    example = run("passes/fuse_batch_norm.py")
    printed = capsys.readouterr().out
    assert "13 nodes before, 8 planned" in printed and "\nequal; 11 nodes" in printed
    assert "not trained, as it is only for evaluation, as pass fuse-batch-norm has made weights of its own" in printed
    # In training mode the pass leaves the graph as it is, and the pipeline trains.
    model, x = example["Net"](), torch.randn(8, 3, 32, 32)
    chain = fxsplit.DEFAULT.before("profile", example["FuseBatchNorm"]())
    with fxsplit.compile(model, ["cpu"] * 2, example_inputs=x, passes=chain) as pipe:
        found = fxsplit.verify(pipe, x)
    assert found.equal and found.detached == "" and any(d.kind == "gradient" for d in found.differences)


def test_a_partitioner_of_ones_own_beside_the_exact_one(capsys: pytest.CaptureFixture[str]) -> None:
    # The third layer crosses the end of the first share: the greedy partitioner cuts once it is done.
    state_times(_0=1.0, _2=1.0, _4=7.0)
    run("passes/greedy.py")
    found = re.search(r"greedy ([\d.]+) ms, exact ([\d.]+) ms, optimal", capsys.readouterr().out)
    assert found is not None and float(found[1]) > float(found[2]) > 0
