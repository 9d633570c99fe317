"""Measure relative errors by squared norms, which can be summed over tensors and over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxsplit.torch_internals.tensors.differences import widen

Squares = dict[str, list[float]]
"""For each name: the squared norms of one or more differences, then the squared norm of the exact tensor."""


def square(tensor: Tensor) -> float:
    """Return the squared norm of a tensor."""
    return float(widen(tensor).abs().square().sum())


def square_differences(found: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> Squares:
    """Return the squared norms of each difference and each exact tensor, for float tensors on both sides."""
    # A tensor that only one side has is a lost gradient, which verify() reports elsewhere.
    both = {name: (found.get(name), value) for name, value in exact.items()}
    return {
        name: [square(widen(a) - widen(b)), square(b)]
        for name, (a, b) in both.items()
        if a is not None and b is not None and (b.is_floating_point() or b.is_complex())
    }


def divide(difference: float, exact: float) -> float:
    """Return the relative norm of a difference, from two squared norms; 0 if both are zero."""
    return (difference / exact) ** 0.5 if exact else float("inf") if difference else 0.0


def divide_all(squares: Squares, number: int = 0) -> float:
    """Return the relative norm of the differences at index `number` of all entries, taken as one vector."""
    return divide(sum(s[number] for s in squares.values()), sum(s[-1] for s in squares.values()))


def find_worst(squares: Squares) -> tuple[float, str]:
    """Return the largest relative difference of a single tensor, and its name."""
    # Per tensor, since an error in a small gradient hardly shows in the norm of all.
    errors = {name: divide(s[0], s[-1]) for name, s in squares.items()}
    name = max(errors, key=errors.__getitem__, default="")
    return errors.get(name, 0.0), name
