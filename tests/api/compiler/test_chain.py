"""compile(plan=, pins=, together=, observers=, check_rewrites=, reproducer=), against the unsplit model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxsplit
from fxsplit.cli.main import main
from fxsplit.errors import BrokenFact, InputError, PlanError
from fxsplit.formats.plan_json import save_plan
from fxsplit.ir.graph import IR


class Net(nn.Module):
    """Four layers with a dropout, which is a node in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(torch.relu(self.one(x)))
        if self.training:
            x = self.drop(x)
        result: torch.Tensor = self.head(torch.relu(self.three(x)))
        return result


def compile_net(**options: Any) -> fxsplit.Pipeline:
    """Return a pipeline of the net on two devices."""
    return fxsplit.compile(Net(), 2, example_inputs=torch.randn(16, 8), n_microbatches=4, **options)


@pytest.mark.parametrize("plan", [{"three": 1}, [["one", "two"], ["three", "head"]], fxsplit.cut_before("three")])
def test_a_stated_plan_is_the_plan_in_both_modes(plan: Any) -> None:
    with compile_net(plan=plan) as pipe:
        assert "three" in pipe.plan.stages[1].nodes and "two" in pipe.plan.stages[0].nodes
        assert pipe.plan.standing == "not proven" and fxsplit.verify(pipe, torch.randn(16, 8)).equal
        pipe.eval()
        with torch.no_grad():
            pipe(torch.randn(16, 8))
        assert "three" in pipe.plan.stages[1].nodes


def test_a_plan_comes_from_a_file_or_another_pipeline(tmp_path: Path) -> None:
    with compile_net(pins={"two": 1}) as pipe:
        found = pipe.plan
    assert "two" in found.stages[1].nodes and "one" in found.stages[0].nodes
    save_plan(found, tmp_path / "plan.json")
    for plan in (found, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        with compile_net(plan=plan) as pipe:
            assert [s.nodes for s in pipe.plan.stages] == [s.nodes for s in found.stages]
            pipe.eval()
            pipe(torch.randn(16, 8))
            assert pipe.plan.stage_of()["two"] == 1


def test_nodes_stay_together() -> None:
    with compile_net(together=[("one", "two", "three")]) as pipe:
        stage_of = pipe.plan.stage_of()
        assert stage_of["one"] == stage_of["two"] == stage_of["three"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"plan": {"tow": 1}}, "cannot split at 'tow': .*did you mean 'two'"),
        ({"plan": {"two": 5}}, "the split has 6 stages for 2 devices"),
        ({"plan": {"two": 1}, "pins": {"one": 0}}, "plan= states all stages: leave out pins= and together="),
        ({"plan": {"two": 1}, "passes": "profile,emit"}, "plan= takes the place of augment, order, partition"),
        ({"pins": {"two": "1"}}, "give the number of a device by submodule or node"),
        ({"together": ["one"]}, "give sets of names that stay together"),
        ({"together": [("one", "tow")]}, "cannot keep 'tow' together"),
        ({"observers": [print]}, "give objects of a subclass of fxsplit.Observer"),
        ({"check_rewrites": 1}, "check_rewrites=1: give True or False"),
        ({"reproducer": 3}, "reproducer=3: give the path of a folder"),
    ],
)
def test_wrong_statements_are_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises((InputError, PlanError), match=error):
        compile_net(**options)


def to_tanh(ir: IR) -> IR:
    """Compute another function."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(ir.gm.graph, {}))
    for node in graph.nodes:
        node.target = torch.tanh if node.target is torch.relu else node.target
    return ir.rewrite(fx.GraphModule(ir.gm, graph))


def test_a_rewrite_is_checked_unless_it_shall_not_be() -> None:
    chain = fxsplit.DEFAULT.before("profile", to_tanh)
    with pytest.raises(BrokenFact, match="after pass 'to-tanh'"):
        compile_net(passes=chain)
    with compile_net(passes=chain, check_rewrites=False) as pipe:
        assert not fxsplit.verify(pipe, torch.randn(16, 8)).equal


def test_a_failing_compile_leaves_a_reproducer(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = "profile{repeats=1},order,partition,emit"
    with pytest.raises(fxsplit.FxsplitError, match="no Antichains yet") as raised:
        compile_net(passes=passes, reproducer=tmp_path / "new")
    path = tmp_path / "new" / "fxsplit-repro.ir"
    assert f"reproducer: fxsplit opt {path}" in raised.value.__notes__
    assert main(["opt", str(path), "--reproducer", str(tmp_path / "again.ir")]) == 1
    assert "pass 1 of 5, 'order': MissingFact: no Antichains yet" in capsys.readouterr().err
    monkeypatch.setenv("FXSPLIT_REPRODUCER", str(tmp_path / "env"))
    with pytest.raises(fxsplit.FxsplitError):
        compile_net(passes=passes)
    run = [sys.executable, "-m", "fxsplit", "opt", "fxsplit-repro.ir"]
    found = subprocess.run(run, cwd=tmp_path / "env", capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "no Antichains yet" in found.stderr


def test_observers_are_told_of_each_pass() -> None:
    seen: list[str] = []

    class Watch(fxsplit.Observer):
        def after(self, name: str, ir: IR) -> None:
            seen.append(name)

    with compile_net(observers=[Watch()]):
        assert seen == ["profile", "augment", "order", "partition", "schedule", "emit", "batch-norm"]


def test_recompute_counts_in_a_stated_plan(tmp_path: Path) -> None:
    """A plan that is stated recomputes as compile(recompute=) says, and its memory and time say so."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    options: dict[str, Any] = {"example_inputs": torch.randn(8, 16), "n_microbatches": 4}
    with fxsplit.compile(model, 2, **options) as pipe:
        costs, found = pipe.costs, pipe.plan
    save_plan(found, tmp_path / "p.json")
    for plan in (fxsplit.cut_before("2"), found, tmp_path / "p.json", {"2": 1}):
        made = {}
        for recompute in ("always", "never"):
            with fxsplit.compile(model, 2, plan=plan, costs=costs, recompute=recompute, **options) as pipe:
                made[recompute] = pipe.plan
        assert [s.recompute for s in made["always"].stages] == [True, True]
        assert [s.recompute for s in made["never"].stages] == [False, False]
        assert made["always"].bottleneck_ms > made["never"].bottleneck_ms
