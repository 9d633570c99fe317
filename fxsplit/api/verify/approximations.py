"""Measure the errors that gradient hooks and compressed cuts make, against an exact step of the unsplit model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fxsplit.api.compiler.compiler import get_mode
from fxsplit.api.pipeline.pipeline import Pipeline
from fxsplit.api.verify.compare import Outcome
from fxsplit.api.verify.trials import Trial
from fxsplit.torch_internals.tensors.squares import divide_all, find_worst, square, square_differences


@dataclass(frozen=True)
class HookEffect:
    """The error that a gradient hook makes in the sums of gradients.

    Each error is |found - exact| / |exact|, with norms over all elements.

    how: the hook, in words.
    gradient: the error of all gradients together.
    worst: the largest error of one parameter's gradient; `worst_name` is the parameter's name.
    left: the norm of the gradients that the hook keeps for later steps, over |exact|; None if the hook keeps nothing.
    lost: the error that later steps will not correct: |found + left - exact| / |exact|.
    loss: the loss of the step, in words.
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
    """Return the error of the gradients that the hook of `pipe` summed in one step, over all ranks.

    found: the step with the hook. exact: the same step of the unsplit model, with exact sums.
    """
    ranks = trial.ranks
    reduction = ranks.find_reduction(pipe)
    compiled = pipe.compiler.get_compiled(get_mode(pipe.model))
    assert compiled is not None, "it has run a step"
    left = reduction.find_left_out(compiled.program, trial.weight)
    # Gradients of other stages come from other ranks.
    squares = square_differences(found.gradients, exact.gradients)
    kept = _name_left(pipe, left)
    for name, one in squares.items():
        mine, other = found.gradients[name], exact.gradients[name]
        assert mine is not None and other is not None
        # Insert kept and lost between difference and exact. If nothing is kept, all of the difference is lost.
        one[1:1] = [0.0, one[0]]
        if name in kept:
            one[1:3] = [square(kept[name]), square(mine + kept[name] - other)]
    # A rank without parameters keeps nothing, and does not know whether other ranks do.
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
    """Return the gradients that the hook keeps for later steps, by the name of the parameter."""
    return {name: left[weight] for name, weight in pipe.model.named_parameters() if left and weight in left}


@dataclass(frozen=True)
class Compression:
    """The error that an approximation, such as compressed cuts, makes in outputs and gradients.

    Each error is |found - exact| / |exact|, with norms over all elements.

    how: the compression, or the passes that change numbers on purpose.
    worst: the largest error of one parameter's gradient; `worst_name` is the parameter's name.
    loss: the loss of the step, in words; empty if the pipeline gives no gradients, and only outputs were compared.
    what: the kind of approximation, for people.
    """

    how: str
    output: float
    gradient: float
    worst: float
    worst_name: str
    loss: str = ""
    what: str = "cuts compressed"

    def __str__(self) -> str:
        outputs = f"{self.what} ({self.how}): outputs off by {self.output:.1e}"
        if not self.loss:
            return outputs
        gradients = f"gradients by {self.gradient:.1e}, at most {self.worst:.1e} ({self.worst_name})"
        return f"{outputs}, {gradients}, for {self.loss}"


def measure_compression(
    how: str, trial: Trial, found: Outcome, exact: Outcome, what: str = Compression.what
) -> Compression:
    """Return the error of a step with compressed cuts (`found`) against the unsplit model's (`exact`), over all ranks.

    how: the compression, such as "int8", or the names of passes. what: the kind of approximation, for people.
    """
    ranks = trial.ranks
    outputs = ranks.merge_squares(square_differences(found.outputs, exact.outputs))
    gradients = ranks.merge_squares(square_differences(found.gradients, exact.gradients))
    return Compression(how, divide_all(outputs), divide_all(gradients), *find_worst(gradients), trial.loss, what)
