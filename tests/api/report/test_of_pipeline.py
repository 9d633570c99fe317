"""pipe.report(): one file, with the model's name, its layers, its passes and a measured step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import FileError, NotThere
from tests.report.test_page import Reader, read_data


def make_pipe() -> fxsplit.Pipeline:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return fxsplit.compile(model, ["cpu", "cpu"], example_inputs=torch.randn(8, 8), loss_fn=nn.functional.cross_entropy)


def test_a_report_has_the_model_its_passes_and_a_measured_step(tmp_path: Path) -> None:
    pipe = make_pipe()
    pipe.report(tmp_path / "report.html", torch.randn(8, 8), target=torch.randint(0, 4, (8,)), seconds=100.0)
    text = (tmp_path / "report.html").read_text("utf-8")
    page, data = Reader(text), read_data(text)
    assert "Sequential is cut into 2 stages" in page.text and "Measured: " in page.text
    assert any(word.startswith("Linear(in_features=8") for word in data["nodes"]["words"])
    assert [t["title"].partition(",")[2].split()[0] for t in data["timelines"]] == ["predicted", "measured"]
    for step in ("profile", "augment", "order", "partition", "emit", "batch-norm"):
        assert any(text.strip() == step for text in page.texts), step
    assert "of the graph added" in page.text and 'costs="profile.json", plan="plan.json"' in page.text


def test_without_a_batch_nothing_is_measured(tmp_path: Path) -> None:
    pipe = make_pipe()
    before = [p.grad for p in pipe.parameters()]
    pipe.report(tmp_path / "report.html", seconds=0.0)
    assert "Measured: not here" in Reader((tmp_path / "report.html").read_text("utf-8")).text
    assert [p.grad for p in pipe.parameters()] == before
    with pytest.raises(FileError):
        pipe.report(tmp_path / "nowhere" / "report.html", seconds=0.0)


def test_a_plan_from_a_file_is_reported_with_the_costs_of_the_pipeline(tmp_path: Path) -> None:
    pipe = make_pipe()
    pipe.costs.save(tmp_path / "costs.json")
    from fxsplit.formats.plan_json import save_plan

    save_plan(pipe.plan, tmp_path / "plan.json")
    again = fxsplit.compile(pipe.model, ["cpu", "cpu"], example_inputs=torch.randn(8, 8),
                            costs=tmp_path / "costs.json", plan=tmp_path / "plan.json")  # fmt: skip
    again.report(tmp_path / "report.html", seconds=100.0)
    assert "without its profile" not in Reader((tmp_path / "report.html").read_text("utf-8")).text


def test_a_pipeline_that_is_not_compiled_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotThere, match="nothing is compiled yet"):
        fxsplit.compile(nn.Linear(2, 2), 1).report(tmp_path / "report.html")


def test_notebooks_show_plan_and_step() -> None:
    assert make_pipe()._repr_html_().count("<img") == 2
    assert "<img" not in fxsplit.compile(nn.Linear(2, 2), ["cpu"])._repr_html_()
