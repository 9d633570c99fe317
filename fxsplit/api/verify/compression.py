"""Measure the error of compressed cuts, against the same training step of the unsplit model."""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit.api.verify.compare import Outcome
from fxsplit.api.verify.trials import Trial
from fxsplit.torch_internals.tensors.squares import divide_all, find_worst, square_differences


@dataclass(frozen=True)
class Compression:
    """The error of outputs and gradients: |found - exact| / |exact|, as norms over all elements.

    `worst` is the error of the parameter with the largest relative error in its gradient, and `worst_name` its name.
    `loss` describes the loss of the step.
    """

    how: str
    output: float
    gradient: float
    worst: float
    worst_name: str
    loss: str = ""

    def __str__(self) -> str:
        return (
            f"cuts compressed ({self.how}): outputs off by {self.output:.1e}, gradients by {self.gradient:.1e}, "
            f"at most {self.worst:.1e} ({self.worst_name}), for {self.loss}"
        )


def measure_compression(how: str, trial: Trial, found: Outcome, exact: Outcome) -> Compression:
    """Return the error of a step with compressed cuts; each rank has the gradients of its stages."""
    ranks = trial.ranks
    outputs = ranks.merge_squares(square_differences(found.outputs, exact.outputs))
    gradients = ranks.merge_squares(square_differences(found.gradients, exact.gradients))
    return Compression(how, divide_all(outputs), divide_all(gradients), *find_worst(gradients), trial.objective.text)
