"""Passes of one's own: a function, a class with options, by text, by entry point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest
import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import fxsplit
from fxsplit import DEFAULT, IR, Pins
from fxsplit.errors import FxsplitError
from fxsplit.ir import chain as spec
from tests.models import Residual


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, which a pass may edit, and the copy of each node."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    copy.output(copy.graph_copy(graph, made))
    return copy, made


@dataclass(frozen=True)
class Keep:
    """Keep a submodule on one device."""

    module: str = ""
    device: int = 0

    name: ClassVar[str] = "keep"

    def __call__(self, ir: IR) -> IR:
        return Pins.add(ir, {self.module: self.device})


def fold_conv_bn(ir: IR) -> IR:
    """Fold each batch norm into the convolution before it; right in eval mode only."""
    graph, made = copied(ir.gm.graph)
    gm = fx.GraphModule(ir.gm, graph)
    for old in ir.gm.graph.nodes:
        source = old.args[0] if old.args else None
        if not (old.op == "call_module" and isinstance(source, fx.Node) and source.op == "call_module"):
            continue
        conv, bn = ir.gm.get_submodule(str(source.target)), ir.gm.get_submodule(str(old.target))
        if isinstance(conv, nn.Conv2d) and isinstance(bn, nn.BatchNorm2d) and len(source.users) == 1:
            name = f"folded_{source.name}"
            gm.add_module(name, fuse_conv_bn_eval(conv, bn))
            made[source].target = name
            made[old].replace_all_uses_with(made[source])
            graph.erase_node(made[old])
    gm.recompile()
    return ir.rewrite(gm)


def x() -> torch.Tensor:
    return torch.randn(8, 3, 8, 8)


def stages_of(pipe: fxsplit.Pipeline, module: str) -> set[int]:
    stage_of = pipe.plan.stage_of()
    return {stage_of[n.name] for n in pipe.costs.nodes if f"{n.module}.".startswith(f"{module}.")}


@pytest.mark.parametrize("device", [0, 1])
def test_keep_a_submodule_on_a_device(device: int) -> None:
    with fxsplit.compile(
        Residual(), 2, example_inputs=x(), passes=DEFAULT.before("partition", Keep("conv2", device))
    ) as pipe:
        assert stages_of(pipe, "conv2") == {device}
        assert f"keep{{module=conv2{',device=1' if device else ''}}}" in str([s.text for s in pipe.ir.steps])


def test_by_text() -> None:
    text = "profile{repeats=1},augment,order,tests.passes.test_custom_passes:Keep{module=conv2,device=1},partition,emit"
    with fxsplit.compile(Residual(), 2, example_inputs=x(), passes=text) as pipe:
        assert stages_of(pipe, "conv2") == {1}


def test_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("keep", "tests.passes.test_custom_passes:Keep", "fxsplit.passes")
    monkeypatch.setattr(spec, "entry_points", lambda group: [point] if group == "fxsplit.passes" else [])
    text = "profile{repeats=1},augment,order,keep{module=head,device=0},partition,emit"
    with (
        pytest.raises(FxsplitError, match="no plan for 2 devices satisfies the pins"),
        fxsplit.compile(Residual(), 2, example_inputs=x(), passes=text),
    ):
        pass
    with fxsplit.compile(Residual(), 2, example_inputs=x(), passes=text.replace("device=0", "device=1")) as pipe:
        assert stages_of(pipe, "head") == {1}


def test_fold_conv_and_batch_norm_for_eval() -> None:
    """A rewriting pass in front: facts of the old graph are forgotten, and the model itself is untouched."""
    model = Residual().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
    batch = x()
    with fxsplit.compile(model, 2, example_inputs=batch, passes=DEFAULT.before("profile", fold_conv_bn)) as pipe:
        assert not any("bn" in n.name for n in pipe.costs.nodes) and len(pipe.costs.nodes) < 14
        assert next(s.text for s in pipe.ir.steps) == "fold-conv-bn"
        torch.testing.assert_close(pipe(batch), model(batch), rtol=1e-4, atol=1e-5)


def test_a_list_of_passes_is_a_chain() -> None:
    seen: list[int] = []

    def count(ir: IR) -> IR:
        seen.append(len(ir.gm.graph.nodes))
        return ir

    chain: Sequence[fxsplit.Pass] = [count, *DEFAULT]
    with fxsplit.compile(Residual(), 2, example_inputs=x(), passes=chain) as pipe:
        assert len(seen) == 1 and pipe.ir.steps[0].text == "count"
