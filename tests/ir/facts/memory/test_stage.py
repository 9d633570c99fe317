"""The most memory that a stage holds at once, by kind."""

from __future__ import annotations

from fxsplit.ir.facts.memory.moments import Moment
from fxsplit.ir.facts.memory.stage import StageMemory, fill_peak


def test_no_kind_is_negative_if_the_sums_of_gradients_are_larger_than_all_else() -> None:
    """A step that has just taken the sums of an embedding made activations of less than nothing."""
    figures = dict.fromkeys(("resting_bytes", "halfway_bytes", "forward_bytes", "whole_bytes", "first_bytes"), 400.0)
    stage = StageMemory(
        **figures, early_bytes=400.0, late_bytes=400.0, held_bytes=4000.0, parameter_bytes=1000.0,
        optimizer_bytes=2000.0, buffer_bytes=0.0, kept_bytes=300.0, boundary_bytes=100.0, step_bytes=0.0,
    )  # fmt: skip
    for recompute in (False, True):
        found = fill_peak(stage, [Moment("forward_bytes", sums=0)], recompute=recompute)
        assert found.memory_bytes == 4000.0 + 400.0 - 1000.0
        assert min(found.activations_bytes, found.boundaries_bytes, found.working_bytes) >= 0.0
