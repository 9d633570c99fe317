"""Stages: called in turn by the graph, filled into the model's output, and verified against the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from fxsplit import IR
from fxsplit.errors import BrokenFact
from fxsplit.ir.facts.stages import Ref, Stage, Stages, list_weights
from fxsplit.torch_internals.random.seeded_calls import SeededCall


def stage(index: int, takes: str, gives: str, layer: nn.Module) -> Stage:
    """A stage that calls one layer on one value and hands on another, `kept`."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in (takes, "kept")}
    graph.output((graph.call_module("layer", (inputs[takes],)), inputs["kept"]))
    module = fx.GraphModule({"layer": layer}, graph, class_name=f"Stage{index}")
    return Stage(index, f"cpu:{index}", torch.device("cpu"), module, (takes, "kept"), (gives, "kept"))


def two() -> tuple[Stages, IR]:
    parts = (stage(0, "x", "h", nn.Linear(3, 3)), stage(1, "h", "y", nn.Tanh()))
    stages = Stages(parts, {"out": [Ref(0)], "given": Ref(1), "kind": "mean"})
    return stages, IR(stages.call_in_turn("Net")).learn(stages)


def test_the_graph_calls_the_stages_in_turn() -> None:
    stages, ir = two()
    x, kept = torch.randn(2, 3), torch.randn(1)
    layer = stages[0].module.get_submodule("layer")
    expected = torch.tanh(layer(x))
    found = ir.gm(x, kept)
    assert torch.equal(found["out"][0], expected) and found["given"] is kept and found["kind"] == "mean"
    assert type(ir.gm).__name__ == "Net" and ir.gm.get_submodule("stage_1") is stages[1].module
    assert len(stages) == 2 and torch.equal(stages[1](*stages[0](x, kept))[0], expected)


def test_outputs_are_filled_into_the_models_own_structure() -> None:
    stages, _ = two()
    assert stages.fill(["y", "kept"]) == {"out": ["y"], "given": "kept", "kind": "mean"}


def test_stages_that_agree_with_the_graph_verify() -> None:
    stages, ir = two()
    stages.verify(ir)
    text = stages.dumped
    assert "stage 0 on cpu:0: (x, kept) -> (h, kept)" in text and "  def forward(self, h, kept):" in text
    assert str(stages).splitlines()[:2] == [
        "stage  device  nodes  takes   gives",
        "0      cpu:0       1  x kept  h kept",
    ]
    assert repr(stages) == "Stages(2 stages on cpu:0, cpu:1)"


def test_stages_that_the_graph_does_not_call_are_broken() -> None:
    stages, ir = two()
    other, _ = two()
    with pytest.raises(BrokenFact, match="the graph calls other modules than the stages"):
        other.verify(ir)
    with pytest.raises(BrokenFact, match="the graph calls other modules"):
        Stages(stages.stages[:1], stages.result).verify(ir)
    with pytest.raises(BrokenFact, match="the graph calls other modules"):
        Stages(stages.stages[::-1], stages.result).verify(ir)


def test_a_stage_takes_what_the_one_before_gives() -> None:
    stages, ir = two()
    broken = Stages((stages[0], replace(stages[1], inputs=("kept", "h"))), stages.result)
    with pytest.raises(BrokenFact, match=r"stage 1 takes \('kept', 'h'\) and stage 0 gives \('h', 'kept'\)"):
        broken.verify(ir)


def test_a_buffer_lives_in_one_stage() -> None:
    norm = nn.BatchNorm1d(3)
    stages = Stages((stage(0, "x", "h", norm), stage(1, "h", "y", norm)), Ref(0))
    with pytest.raises(BrokenFact, match="stages 0 and 1 share a buffer"):
        stages.verify(IR(stages.call_in_turn("Net")))
    layer = nn.Linear(3, 3)  # parameters may be in several stages
    shared = Stages((stage(0, "x", "h", layer), stage(1, "h", "y", layer)), Ref(0))
    shared.verify(IR(shared.call_in_turn("Net")))


def test_a_stage_runs_as_it_was_compiled() -> None:
    stages, _ = two()
    assert replace(stages[0], compiled=lambda *values: values[::-1])(1, 2) == (2, 1)


def test_weights_are_listed_once() -> None:
    layer = nn.BatchNorm1d(3)
    assert len(list_weights(nn.Sequential(layer, layer))) == 5


def test_a_stage_is_one_line_or_its_code() -> None:
    """print() showed a dataclass with a module inside."""
    first = two()[0][0]
    assert repr(first) == "Stage(0 on cpu:0: (x, kept) -> (h, kept))"
    assert str(first).splitlines()[0] == "stage 0 on cpu:0: (x, kept) -> (h, kept)" and "self.layer(x)" in str(first)
    assert "stage 0 on cpu:0" in first._repr_html_()


def test_what_draws_is_named_below_the_code() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = {"draw_d": nn.Dropout(0.2), "draw_f": nn.functional.dropout, "draw_m": "bernoulli"}
    for path in calls:
        x = graph.call_module(path, (x,))
    graph.output((x,))
    held = {path: SeededCall(path, call) for path, call in calls.items()}
    shown = str(Stage(0, "cpu:0", torch.device("cpu"), fx.GraphModule(held, graph), ("x",), ("y",)))
    own = "with random numbers of its own for each microbatch"
    assert shown.splitlines()[-3:] == [
        f"  draw_d calls Dropout(p=0.2, inplace=False), {own}",
        f"  draw_f calls torch.nn.functional.dropout, {own}",
        f"  draw_m calls torch.Tensor.bernoulli, {own}",
    ]
