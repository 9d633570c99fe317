"""Recurrent layers: their weights lie in one piece, and they compute with those that their attributes are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxsplit.torch_internals.recurrent import flatten_weights


@pytest.mark.parametrize(("device", "expected"), [("meta", 1), ("cpu", 0)])
def test_scattered_weights_on_an_accelerator_are_laid_in_one_piece(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[nn.Module] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2), nn.ReLU()).to(device)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append(self))
    flatten_weights(model.modules())
    assert calls == [model[1]] * expected


def test_weights_in_one_piece_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be alive that has kept them."""
    calls: list[nn.Module] = []
    layer = nn.LSTM(2, 2).to("meta")
    memory = torch.empty(1000, device="meta")
    for weight in layer.parameters():
        weight.data = memory[: weight.numel()].view_as(weight)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda self: calls.append(self))
    flatten_weights([layer])
    assert not calls


def test_a_layer_is_flattened_with_the_weights_that_it_has_now() -> None:
    """It keeps a list of them, which is of other weights after those of a replica have been put in."""
    layer, other = nn.LSTM(2, 2), nn.LSTM(2, 2)
    layer._parameters.update(other._parameters)
    flatten_weights([layer])
    assert all(mine is its for mine, its in zip(layer._flat_weights, other.parameters(), strict=True))
