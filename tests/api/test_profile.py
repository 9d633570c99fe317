"""profile() returns the costs of a microbatch, and leaves the model as it was."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxsplit
from fxsplit.formats.plan_json import plan_to_dict, read_plan, save_plan


def small() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), torch.ones(8, 4)


@pytest.mark.parametrize(("n_microbatches", "rows"), [(1, 8), (3, 3), (8, 1)])
def test_costs_are_of_the_largest_microbatch(n_microbatches: int, rows: int) -> None:
    model, x = small()
    costs = fxsplit.profile(model.eval(), x, n_microbatches=n_microbatches, repeats=1)
    assert costs.rows == rows and [n.name for n in costs.nodes] == ["_0", "_1", "_2"]
    # Float32: 8 and 2 numbers a row.
    assert [n.output_bytes for n in costs.nodes] == [32 * rows, 32 * rows, 8 * rows]
    assert costs.device_kind == "cpu" and all(n.forward_ms > 0 for n in costs.nodes)


def test_a_model_is_left_as_it_was() -> None:
    """Gradients are measured even if the caller has switched them off, and none is kept."""
    model, x = small()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        costs = fxsplit.profile(model, x, repeats=1)
    assert all(n.backward_ms > 0 for n in costs.nodes)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_measured_is_named() -> None:
    model, x = small()
    with pytest.raises(fxsplit.FxsplitError, match="n_microbatches=0"):
        fxsplit.profile(model, x, n_microbatches=0)
    with pytest.raises(fxsplit.FxsplitError, match="model is a dict"):
        fxsplit.profile({}, x)  # type: ignore[arg-type]
    with pytest.raises(fxsplit.FxsplitError, match="repeats=0"):
        fxsplit.profile(model, x, repeats=0)
    with pytest.raises(fxsplit.FxsplitError, match=r"repeats=2\.5: give a number"):
        fxsplit.profile(model, x, repeats=2.5)  # type: ignore[arg-type]
    with pytest.raises(fxsplit.FxsplitError, match="inference='no': give True or False"):
        fxsplit.profile(model, x, inference="no")  # type: ignore[arg-type]


def make_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


@pytest.mark.parametrize("inputs", [torch.ones(32, 64), torch.empty(32, 64, device="meta")])
def test_a_model_without_weights_is_estimated_for_a_device_elsewhere(inputs: Tensor) -> None:
    costs = fxsplit.profile(make_meta(), inputs, on="h100", dtype="bfloat16", n_microbatches=2)
    assert costs.rows == 16 and costs.device_kind == "cuda" and costs.total_ms > 0 and costs.weighed
    assert [n.kind for n in costs.nodes][1] == "pointwise" and all(n.spread_ms for n in costs.nodes)
    # bfloat16: 256 numbers a row, and two bytes each.
    assert costs.nodes[0].output_bytes == 16 * 256 * 2 and costs.nodes[0].parameter_bytes == (64 * 256 + 256) * 2
    said = costs.estimated
    assert said is not None and (said.device, said.dtype, said.compiled, said.unknown) == (
        "h100",
        "bfloat16",
        False,
        (),
    )


def test_an_estimate_is_told_in_files_plans_and_texts(tmp_path: Path) -> None:
    costs = fxsplit.profile(make_meta(), torch.ones(32, 64), on="RTX 3090")
    costs.save(tmp_path / "net.json")
    loaded = fxsplit.Costs.load(tmp_path / "net.json")
    assert loaded.estimated == costs.estimated and loaded.nodes == costs.nodes
    assert "estimated for rtx-3090, not measured (float32, table" in str(costs) and "measured on" not in str(costs)
    # Estimates are no noise of a busy machine.
    assert costs.spread is not None and costs.spread > 0.2 and costs.noise is None
    plan = fxsplit.plan(loaded, 2)
    assert plan.optimal and plan.standing == "optimal for estimated times" and plan.estimated == costs.estimated
    assert "estimated for rtx-3090, not measured" in str(plan)
    save_plan(plan, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["estimated"]["device"] == "rtx-3090"
    assert read_plan(tmp_path / "plan.json").estimated == costs.estimated
    measured = fxsplit.plan(replace(costs, estimated=None), 2)
    assert plan_to_dict(measured)["estimated"] is None and measured.standing == "optimal"


def test_a_faster_device_is_faster_and_the_model_stays_as_it_was() -> None:
    model, x = small()
    before = copy.deepcopy(model.state_dict())
    times = {kind: fxsplit.profile(model, x, on=kind, dtype="float16").compute_ms for kind in ("t4", "v100", "h100")}
    assert times["t4"] >= times["v100"] >= times["h100"]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())


def test_estimates_do_not_depend_on_the_machine_that_makes_them() -> None:
    model, x = small()
    first, second = (fxsplit.profile(model, x, on="a100-80") for _ in range(2))
    assert first.to_text() == second.to_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "h1000"}, "unknown device 'h1000'.*did you mean 'h100'"),
        ({"on": 100}, "on=100: give the name of a device"),
        ({"on": "h100", "dtype": "bfloat"}, "dtype='bfloat': give one of .*did you mean 'bfloat16'"),
        ({"on": "v100", "dtype": torch.bfloat16}, "device 'v100' does not compute in bfloat16"),
        ({"on": "v100", "dtype": "tf32"}, "device 'v100' does not compute in tf32"),
        ({"dtype": "float16"}, "dtype='float16' is for estimates: give on="),
        ({"compiled": True}, "compiled is for estimates: give on="),
        ({"on": "h100", "compiled": 1}, "compiled=1: give True or False"),
        ({"shapes": 1}, "shapes=1: give True or False"),
    ],
)
def test_wrong_options_of_an_estimate_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fxsplit.FxsplitError, match=message):
        fxsplit.profile(*small(), **options)


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def test_a_model_that_needs_values_is_told_the_line_and_the_way_out() -> None:
    with pytest.raises(fxsplit.FxsplitError, match=r"float\(x.sum\(\)\)(.|\n)*real device"):
        fxsplit.profile(Reads(), torch.ones(4, 4), on="h100")


def test_shapes_measure_a_model_without_weights() -> None:
    costs = fxsplit.profile(make_meta(), torch.ones(32, 64), shapes=True, repeats=1)
    assert costs.estimated is None and costs.device_kind == "cpu" and all(n.forward_ms > 0 for n in costs.nodes)


def test_an_estimate_stays_one_in_the_text_of_an_ir(tmp_path: Path) -> None:
    model, x = small()
    ir = fxsplit.run(fxsplit.capture(model, x, devices=2), "profile{on=h100,compiled=true},augment,order,partition")
    ir.save(tmp_path / "net.ir")
    back = fxsplit.load_ir(tmp_path / "net.ir")
    assert back[fxsplit.Costs].estimated == ir[fxsplit.Costs].estimated == back[fxsplit.Plan].estimated
    assert back[fxsplit.Plan].standing == "optimal for estimated times"
