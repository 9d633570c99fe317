"""Squares: how far tensors are from exact ones, as squares of lengths, which add up over tensors and over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxsplit.torch_internals.tensors.differences import widen

Squares = dict[str, list[float]]
"""By name, the squares of the lengths of differences, and last that of what is exact."""


def square(tensor: Tensor) -> float:
    """Return the square of the length of a tensor, as a vector of all its elements."""
    return float(widen(tensor).abs().square().sum())


def square_differences(found: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> Squares:
    """Return the squares of each difference and of each exact tensor, of floating-point tensors that both have."""
    # What only one side has is a lost gradient, of which verify() tells elsewhere.
    both = {name: (found.get(name), value) for name, value in exact.items()}
    return {
        name: [square(widen(a) - widen(b)), square(b)]
        for name, (a, b) in both.items()
        if a is not None and b is not None and (b.is_floating_point() or b.is_complex())
    }


def divide(difference: float, exact: float) -> float:
    """Return the relative length of a difference, from squares; none of what is zero in both."""
    return (difference / exact) ** 0.5 if exact else float("inf") if difference else 0.0


def divide_all(squares: Squares, number: int = 0) -> float:
    """Return the relative length of all differences with a number, taken as one vector."""
    return divide(sum(s[number] for s in squares.values()), sum(s[-1] for s in squares.values()))


def find_worst(squares: Squares) -> tuple[float, str]:
    """Return the largest relative difference of one name, with the name."""
    # A small gradient may be far off, although it changes the whole little.
    errors = {name: divide(s[0], s[-1]) for name, s in squares.items()}
    name = max(errors, key=errors.__getitem__, default="")
    return errors.get(name, 0.0), name
