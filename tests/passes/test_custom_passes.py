"""Passes of one's own: a function, a class with options, by text, by entry point."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import DEFAULT, IR
from fxsplit.errors import FxsplitError
from fxsplit.ir import chain as spec
from tests.support.models import Residual
from tests.support.own_passes import Keep, fold_conv_bn


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
        assert f"tests.support.own_passes:Keep{{module=conv2{',device=1' if device else ''}}}" in str(
            [s.text for s in pipe.ir.steps]
        )


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
        assert next(s.text for s in pipe.ir.steps) == "tests.support.own_passes:fold_conv_bn"
        with torch.no_grad():
            torch.testing.assert_close(pipe(batch), model(batch), rtol=1e-4, atol=1e-5)


def test_a_list_of_passes_is_a_chain() -> None:
    seen: list[int] = []

    def count(ir: IR) -> IR:
        seen.append(len(ir.gm.graph.nodes))
        return ir

    chain: Sequence[fxsplit.Pass] = [count, *DEFAULT]
    with fxsplit.compile(Residual(), 2, example_inputs=x(), passes=chain) as pipe:
        assert len(seen) == 1 and pipe.ir.steps[0].text == "count"
