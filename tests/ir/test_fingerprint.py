"""A pass that edits the graph, the captured one, or the model's modules in place is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxsplit
from fxsplit import DEFAULT, IR
from fxsplit.errors import BrokenFact
from fxsplit.ir.facts.stages import Stages
from fxsplit.ir.fingerprint import MOST_READ, find_edit, take_fingerprint
from fxsplit.schedule.generators.catalogue import ScheduleName
from tests.support.own_passes import copied

X = torch.randn(8, 8)


class Net(nn.Module):
    """A function, a module with an attribute, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.relu(self.norm(self.a(x))))
        return result


def set_target(gm: fx.GraphModule) -> None:
    next(n for n in gm.graph.nodes if n.target is torch.relu).target = torch.tanh
    gm.recompile()


def insert_node(gm: fx.GraphModule) -> None:
    relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
    with gm.graph.inserting_after(relu):
        gm.graph.call_function(torch.neg, (relu,))


def swap_notes(gm: fx.GraphModule) -> None:
    first, second = [n for n in gm.graph.nodes if n.op == "call_module"][:2]
    first.meta, second.meta = second.meta, first.meta


def replace_module(gm: fx.GraphModule) -> None:
    gm.set_submodule("a", nn.Linear(8, 8))


def set_attribute(gm: fx.GraphModule) -> None:
    gm.get_submodule("norm").eps = 0.1  # type: ignore[assignment]


def set_mode(gm: fx.GraphModule) -> None:
    gm.get_submodule("norm").eval()


def write_weight(gm: fx.GraphModule) -> None:
    with torch.no_grad():
        gm.get_parameter("a.weight").mul_(2.0)


def write_weight_unseen(gm: fx.GraphModule) -> None:
    gm.get_parameter("norm.weight").data.mul_(2.0)


def freeze_weight(gm: fx.GraphModule) -> None:
    gm.get_parameter("a.weight").requires_grad_(False)


def run_in_training(gm: fx.GraphModule) -> None:
    gm(X)


def hook_module(gm: fx.GraphModule) -> None:
    gm.get_submodule("norm").register_forward_hook(lambda module, args, out: out * 2)


def hook_weight(gm: fx.GraphModule) -> None:
    gm.get_parameter("a.weight").register_hook(lambda gradient: gradient * 2)


def hook_weight_behind(gm: fx.GraphModule) -> None:
    gm.get_parameter("a.weight").register_post_accumulate_grad_hook(lambda weight: None)


def replace_forward(gm: fx.GraphModule) -> None:
    gm.get_submodule("norm").forward = torch.zeros_like


EDITS: dict[Callable[[fx.GraphModule], None], str] = {
    set_target: "node 'relu'",
    insert_node: "node '.*'",
    swap_notes: "node 'a'",
    replace_module: "the graph's modules",
    set_attribute: r"attribute 'norm\.eps'",
    set_mode: r"attribute 'norm\.training'",
    write_weight: r"the values of 'a\.weight'",
    write_weight_unseen: r"the values of 'norm\.weight'",
    freeze_weight: r"the values of 'a\.weight'",
    hook_module: r"attribute 'norm\._forward_hooks'",
    hook_weight: r"the values of 'a\.weight'",
    hook_weight_behind: r"the values of 'a\.weight'",
    replace_forward: r"attribute 'norm\.forward'",
    run_in_training: r"the values of 'norm\.running_mean'",
}


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("at", ["profile", "emit"])
def test_an_edit_in_place_is_refused(edit: Callable[[fx.GraphModule], None], at: str) -> None:
    """The edit reached the captured graph, from which the other mode starts, and the model; nobody said so."""

    def meddle(ir: IR) -> IR:
        edit(ir.gm)
        return ir

    with pytest.raises(BrokenFact, match=f"after pass 'meddle': the pass has edited {EDITS[edit]} of Net in place"):
        fxsplit.compile(Net(), 2, example_inputs=X, passes=DEFAULT.before(at, meddle))


@pytest.mark.parametrize("schedule", ["1F1B", "auto"])
def test_the_captured_graph_is_watched_behind_a_rewrite(schedule: ScheduleName) -> None:
    kept: list[IR] = []

    def copy(ir: IR) -> IR:
        kept.append(ir)
        graph, _ = copied(ir.gm.graph)
        return ir.rewrite(fx.GraphModule(ir.gm, graph))

    def edit_first(ir: IR) -> IR:
        set_target(kept[-1].gm)
        return ir

    chain = DEFAULT.before("profile", copy, edit_first)
    with pytest.raises(BrokenFact, match="after pass 'edit-first': the pass has edited node 'relu' of Net"):
        fxsplit.compile(Net(), 2, example_inputs=X, passes=chain, schedule=schedule)


def test_the_graph_of_a_stage_is_watched() -> None:
    def edit_stage(ir: IR) -> IR:
        for stage in ir[Stages].stages:
            for node in stage.module.graph.nodes:
                node.target = torch.tanh if node.target is torch.relu else node.target
            stage.module.recompile()
        return ir

    with pytest.raises(BrokenFact, match="after pass 'edit-stage': the pass has edited node 'relu'"):
        fxsplit.compile(Net(), 2, example_inputs=X, passes=DEFAULT.after("emit", edit_stage))


def test_passes_may_look_and_note() -> None:
    """An analysis that runs the graph in evaluation, and keeps notes of its own at nodes, edits nothing."""

    def look(ir: IR) -> IR:
        for node in ir.gm.graph.nodes:
            node.meta["mine"] = len(node.users)
        ir.gm(X)
        return ir

    with fxsplit.compile(Net().eval(), 2, example_inputs=X, passes=DEFAULT.after("profile", look)) as pipe:
        assert pipe.ir.mode == "eval"


class Held(nn.Module):
    """Holds one tensor as a buffer."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("held", tensor)

    def forward(self, x: Tensor) -> Any:
        return x, self.held


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2 * MOST_READ + 1),
        torch.randn(3, MOST_READ).t(),
        torch.ones(4),
        torch.tensor(float("nan")),
        torch.tensor([True, False]),
        torch.zeros(0),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(4).bfloat16(),
        torch.eye(3).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=lambda t: f"{t.dtype}-{t.numel()}",
)
def test_all_kinds_of_tensors_have_a_fingerprint(tensor: Tensor) -> None:
    gm = fx.symbolic_trace(Held(tensor))
    ir = IR(gm)
    before = take_fingerprint(ir)
    assert find_edit(before, take_fingerprint(ir)) is None
    if tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta:
        with torch.no_grad():
            gm.get_buffer("held").zero_()
        assert find_edit(before, take_fingerprint(ir)) == "the values of 'held'"
