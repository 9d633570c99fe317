"""profile() returns the costs of a microbatch, and leaves the model as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxsplit


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
