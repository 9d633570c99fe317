"""Constants of a graph follow the device that their stage is on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit.torch_internals.fx.constant_devices import fix_constant_devices, move_constants, name_other_device
from tests.support.models import FAST


class Constants(nn.Module):
    """Makes tensors on the device of its inputs, in every way there is."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.a, self.b, self.branches = nn.Linear(8, 8), nn.Linear(8, 8), branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.shape[1] > 100:
            return x
        h = torch.tanh(self.a(x))
        if self.branches:
            h = h + torch.arange(8, device=x.device) + torch.zeros(8).to(x.device) + torch.full((8,), 2.0, device="cpu")
            with torch.autocast("cpu", torch.bfloat16):
                h = h * torch.ones(8, device=x.device)
            h = h.float()
        h = h.to(x.device, torch.float32) + x.new_ones(8) + h.to("cpu")
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize("branches", [False, True], ids=["symbolic_trace", "export"])
def test_constants_follow_their_stage(branches: bool) -> None:
    """Nothing names the capture's device any more, so a stage can run on another device, here the meta device."""
    model, x = Constants(branches), torch.randn(6, 8)
    with fxsplit.compile(model, 2, example_inputs=x, n_microbatches=2, passes=FAST) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        here = torch.device("meta")
        values = (x.to(here),)
        for stage in pipe.stages.stages:
            move_constants(stage.module, torch.device("cpu"), here)
            values = stage.module.to(here)(*values)
            assert all(v.device == here for v in values if isinstance(v, Tensor)) and "cpu')" not in stage.code


def test_a_question_for_a_device_is_answered_once() -> None:
    def ask(x: Tensor) -> Tensor:
        return x + torch.ones(2, device=x.device) + torch.zeros(2).to(x.device)

    gm = fx.symbolic_trace(ask)
    assert fix_constant_devices(gm, torch.device("meta")) is gm
    assert not [n for n in gm.graph.nodes if n.target is getattr]
    assert gm(torch.ones(2, device="meta")).device.type == "meta" and "getattr" not in gm.code


def moved(run: Any, captured_on: str = "cpu", here: str = "meta") -> fx.GraphModule:
    gm = fx.symbolic_trace(run)
    move_constants(gm, torch.device(captured_on), torch.device(here))
    return gm


def arguments(gm: fx.GraphModule) -> list[Any]:
    return [a for n in gm.graph.nodes for a in (*n.args, *n.kwargs.values()) if not isinstance(a, fx.Node)]


def test_only_what_names_the_device_of_the_capture_moves() -> None:
    meta = torch.device("meta")
    assert arguments(moved(lambda x: x.to("cpu"))) == [meta] and arguments(moved(lambda x: x.to("float32"))) == [
        "float32"
    ]
    assert arguments(moved(lambda x: x.new_ones(2, device="cpu"))) == [2, meta]
    assert arguments(moved(lambda x: x.new_ones(2, device=torch.device("cpu")))) == [2, meta]
    assert arguments(moved(lambda x: x.split("cpu"))) == ["cpu"], "a text that no device is asked for"
    assert arguments(moved(lambda x: x.to("cuda:1"), "cuda:0")) == ["cuda:1"], "another device of the same kind"
    assert arguments(moved(lambda x: x.to("cuda"), "cuda:0")) == [meta], "the current one of its kind"
    assert arguments(moved(lambda x: x.to("cpu"), "meta", "meta")) == ["cpu"]


def test_graphs_inside_a_graph_move_too() -> None:
    inner = fx.symbolic_trace(lambda x: x.to("cpu"))
    graph = fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    outer = fx.GraphModule({"inner": inner}, graph)
    move_constants(outer, torch.device("cpu"), torch.device("meta"))
    assert arguments(inner) == [torch.device("meta")] and "meta" in inner.code


def test_a_node_runs_with_another_device_than_it_names() -> None:
    graph = fx.Graph()
    made = graph.call_function(torch.zeros, ([2],), {"device": torch.device("cpu"), "dtype": torch.int64})
    moved = graph.call_method("to", (made, "cpu"))
    here, there = torch.device("cpu"), torch.device("cuda:1")
    assert name_other_device(made, dict(made.kwargs), here, there) == {"device": there, "dtype": torch.int64}
    assert name_other_device(moved, (1, ["cpu", {"a": here}]), here, there) == (1, [there, {"a": there}])
    assert name_other_device(made, ("cpu", {"device": "cpu", "mode": "cpu"}), here, there) == (
        "cpu",
        {"device": there, "mode": "cpu"},
    )
    assert made.kwargs["device"] == here
