"""Targets are moved to the loss's device, also inside containers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxsplit.runtime import microbatches
from fxsplit.runtime.microbatches import Targets

META = torch.device("meta")


def test_tensors_in_containers_are_moved() -> None:
    """Once a target on another device than the last stage caused torch's error about two devices."""
    made = Targets([{"labels": torch.ones(2), "more": [torch.zeros(3), "name"]}, torch.ones(1)])
    placed = made.place(0, META)
    assert placed["labels"].device == META == placed["more"][0].device and placed["more"][1] == "name"
    assert made.place(0, META) is placed, "once"
    assert made.place(1, META).device == META and made.given[1].device.type == "cpu"
    assert made.place(1, torch.device("cpu")) is made.given[1]


def test_what_the_caller_keeps_on_the_host_beside_others_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that a loss reads on the host."""
    monkeypatch.setattr(microbatches, "is_on_host", lambda tensor: tensor.dtype == torch.int64)
    labels, lengths = torch.ones(2), torch.tensor([1, 2])
    placed: list[Tensor] = Targets([[labels, lengths]]).place(0, META)
    assert placed[0].device == META and placed[1] is lengths
    alone: list[Tensor] = Targets([[lengths]]).place(0, META)
    assert alone[0].device == META
