"""Layer drop of rate 0: the answer is known, and the draw leaves the generator as it was."""

from __future__ import annotations

import pytest
import torch

from fxsplit.frontend.layer_drop import NeverDropped


@pytest.mark.parametrize("rate", [0, 0.0, -1.0])
def test_a_draw_is_never_below_zero_and_is_taken_back(rate: float) -> None:
    before = torch.get_rng_state()
    with NeverDropped():
        found: object = torch.rand([]) < rate
    assert found is False
    assert torch.equal(torch.get_rng_state(), before)


def test_a_real_rate_is_decided_by_the_draw() -> None:
    before = torch.get_rng_state()
    with NeverDropped():
        assert bool(torch.rand([]) < 2.0) and isinstance(torch.rand([]) < 0.5, torch.Tensor)
    assert not torch.equal(torch.get_rng_state(), before)


def test_what_was_drawn_after_it_stays_drawn() -> None:
    with NeverDropped():
        early, later = torch.rand([]), torch.rand(3)
        found: object = early < 0.0
    assert found is False
    torch.manual_seed(0)
    torch.rand([])
    assert torch.equal(torch.rand(3), later)


def test_other_tensors_are_compared_as_ever() -> None:
    with NeverDropped():
        assert bool(torch.tensor(-1.0) < 0.0)
