"""Measure what compressed cuts change: a step of a pipeline with them beside the same step of the unsplit model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fxsplit.api.compare import Outcome
from fxsplit.api.differences import widen


@dataclass(frozen=True)
class Compression:
    """The error of outputs and gradients: |found - exact| / |exact|, as lengths of vectors of all their elements.

    `worst` is the error of the parameter whose gradient is furthest off, and `worst_name` its name.
    """

    how: str
    output: float
    gradient: float
    worst: float
    worst_name: str

    def __str__(self) -> str:
        return (
            f"cuts compressed ({self.how}): outputs off by {self.output:.1e}, gradients by {self.gradient:.1e}, "
            f"at most {self.worst:.1e} ({self.worst_name})"
        )


def measure_compression(how: str, found: Outcome, exact: Outcome) -> Compression:
    """Return how far a step with compressed cuts is from the exact one."""
    outputs, gradients = _measure_each(found.outputs, exact.outputs), _measure_each(found.gradients, exact.gradients)
    # A small gradient may be far off, although it changes the whole little.
    errors = {name: _divide(*pair) for name, pair in gradients.items()}
    name = max(errors, key=errors.__getitem__, default="")
    return Compression(how, _divide_all(outputs), _divide_all(gradients), errors.get(name, 0.0), name)


Pair = tuple[float, float]
"""The squares of the lengths of a difference, and of what is exact."""


def _measure_each(found: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> dict[str, Pair]:
    """Return, for each floating-point tensor that both have, the squares of its lengths."""
    # What only one side has is a lost gradient, of which verify() tells elsewhere.
    both = {name: (found.get(name), value) for name, value in exact.items()}
    return {
        name: (float((widen(a) - widen(b)).abs().square().sum()), float(widen(b).abs().square().sum()))
        for name, (a, b) in both.items()
        if a is not None and b is not None and (b.is_floating_point() or b.is_complex())
    }


def _divide(difference: float, exact: float) -> float:
    """Return the error of lengths from their squares; none of what is zero in both."""
    return (difference / exact) ** 0.5 if exact else float("inf") if difference else 0.0


def _divide_all(pairs: Mapping[str, Pair]) -> float:
    return _divide(sum(a for a, _ in pairs.values()), sum(b for _, b in pairs.values()))
