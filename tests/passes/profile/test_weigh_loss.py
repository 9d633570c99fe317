"""The memory of a loss, against the assumption for an unknown loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxsplit.ir.facts.costs.loss import LossCost
from fxsplit.passes.profile.weigh_loss import weigh_loss

GRAPH = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
SIZE = 100 * 1000 * 4
"""Bytes of the outputs below."""


@pytest.mark.parametrize(
    ("loss", "kept", "backward", "keeps_outputs"),
    [
        (F.cross_entropy, 1, 2, False),
        (nn.CrossEntropyLoss(), 1, 2, False),
        (partial(F.cross_entropy, reduction="sum"), 1, 2, False),
        (F.mse_loss, 1, 1, True),
        (F.binary_cross_entropy_with_logits, 0, 1, True),
    ],
)
def test_losses_of_torchs_own_are_weighed(loss: Any, kept: int, backward: int, keeps_outputs: bool) -> None:
    """In sizes of the outputs. The result of mse_loss has memory for all elements."""
    state = torch.get_rng_state()
    found = weigh_loss(loss, GRAPH, "float32[100, 1000]")
    assert found is not None and found.keeps_outputs == keeps_outputs
    assert found.kept_bytes / SIZE == pytest.approx(kept, abs=0.01)
    assert found.backward_peak_bytes / SIZE == pytest.approx(backward, abs=0.01)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cross_entropy_is_what_is_assumed_of_others() -> None:
    found, assumed = weigh_loss(F.cross_entropy, GRAPH, "float32[100, 1000]"), LossCost.assume(SIZE)
    assert found is not None and found.kept_bytes == pytest.approx(assumed.kept_bytes, rel=0.01)
    assert found.backward_peak_bytes == pytest.approx(assumed.backward_peak_bytes, rel=0.01)


def test_other_functions_are_not_called() -> None:
    """They would meet made-up outputs and targets, and may note them."""
    seen: list[Any] = []

    def own(outputs: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return outputs.sum()

    assert weigh_loss(own, GRAPH, "float32[8, 4]") is None and weigh_loss(partial(own), GRAPH, "float32[8, 4]") is None
    hooked = nn.MSELoss()
    hooked.register_forward_hook(lambda *given: seen.append(given))
    assert weigh_loss(hooked, GRAPH, "float32[8, 4]") is None
    assert weigh_loss(F.ctc_loss, GRAPH, "float32[8, 4]") is None, "takes other targets"
    assert weigh_loss(F.mse_loss, GRAPH, "tuple") is None and seen == []


def test_of_large_outputs_some_rows_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxsplit.passes.profile.weigh_loss.MOST_BYTES", SIZE // 10)
    found = weigh_loss(F.cross_entropy, GRAPH, "float32[100, 1000]")
    assert found is not None and found.kept_bytes == pytest.approx(SIZE, rel=0.01)
    assert weigh_loss(F.cross_entropy, GRAPH, "float32[1, 100000]") is None, "one row is too large"
