"""Measure what a gradient hook changes: sums of gradients by the hook beside exact ones, in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fxsplit.api.compiler.compiled import get_mode
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import Outcome
from fxsplit.api.verify.trials import Trial
from fxsplit.torch_internals.tensors.squares import divide_all, find_worst, square, square_differences


@dataclass(frozen=True)
class HookEffect:
    """The error of summed gradients: |found - exact| / |exact|, as lengths of vectors of all their elements.

    `worst` is the error of the parameter whose gradient is furthest off, and `worst_name` its name. `left` is what the
    hook keeps for later steps, relative to the exact sums; None for a hook that keeps nothing. `lost` is what is
    neither applied nor kept: |found + left - exact| / |exact|. Where nothing is kept that is the error again.
    `loss` is the loss that the gradients are of, in words.
    """

    how: str
    gradient: float
    worst: float
    worst_name: str
    left: float | None
    lost: float
    loss: str = ""

    def __str__(self) -> str:
        kept = "nothing is kept for later steps" if self.left is None else f"{self.left:.1e} is kept for later steps"
        return (
            f"gradients added by {self.how}: off by {self.gradient:.1e}, at most {self.worst:.1e} "
            f"({self.worst_name}), for {self.loss}; {kept}, {self.lost:.1e} is lost"
        )


def measure_hook(pipe: Pipeline, trial: Trial, found: Outcome, exact: Outcome) -> HookEffect:
    """Return how far gradients that `pipe` has summed by its hook in one step are from exact ones.

    Each rank has the gradients of its stages.
    """
    ranks = trial.ranks
    reduction = ranks.find_reduction(pipe)
    compiled = pipe.compiler.get_compiled(get_mode(pipe.model))
    assert compiled is not None, "it has run a step"
    left = reduction.find_left_out(compiled.program, trial.weight)
    # Names that this rank has none of come from others.
    squares = square_differences(found.gradients, exact.gradients)
    kept = _name_left(pipe, left)
    for name, one in squares.items():
        mine, other = found.gradients[name], exact.gradients[name]
        assert mine is not None and other is not None
        # Between the difference and what is exact: what is kept, and what is lost, all of it where nothing is kept.
        one[1:1] = [0.0, one[0]]
        if name in kept:
            one[1:3] = [square(kept[name]), square(mine + kept[name] - other)]
    # A rank without parameters keeps nothing, and does not know whether others do.
    merged = ranks.merge_squares(squares)
    keeps = ranks.any(left is not None)
    return HookEffect(
        reduction.choice.text,
        divide_all(merged),
        *find_worst(merged),
        divide_all(merged, 1) if keeps else None,
        divide_all(merged, 2),
        trial.objective.text,
    )


def _name_left(pipe: Pipeline, left: Mapping[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """Return what was left out by the names of parameters."""
    return {name: left[weight] for name, weight in pipe.model.named_parameters() if left and weight in left}
