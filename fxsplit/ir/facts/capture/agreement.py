"""Find how an output of a batch may follow from the outputs of pieces of the batch: the kinds that fit, such as a mean.

If several kinds fit on one batch, `mix_rows` makes other rows of the same sort, on which to compare again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit.ir.facts.capture.output_kinds import Kind

TOLERANCE = 2e-6
"""Relative tolerance on the scale of the largest value: kernels sum in another order for another number of rows.

Results of lower precision are compared in double precision, or else within `LOOSE`.
"""
LOOSE = 1e-4
LOOSE_IN_HALF = 5e-2
SHARE = 0.7
"""The share of the first row in a mixed row, which is a weighted mean of two rows."""


def is_close(a: Tensor, b: Tensor, largest: float | None = None, *, loose: bool = False) -> bool:
    """Return whether two tensors of the same shape are equal up to rounding.

    largest: the size relative to which rounding is measured (default: the largest value of the two).
    loose: allow the rounding of single or half precision.
    """
    if not (a.is_floating_point() or a.is_complex()) or a.numel() == 0:
        return torch.equal(a, b)
    size = _find_largest(a, b) if largest is None else largest
    tolerance = TOLERANCE if not loose else LOOSE_IN_HALF if a.dtype.itemsize < 4 else LOOSE
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def list_kinds(whole: Tensor, pieces: Sequence[Tensor], rows: Sequence[int], *, loose: bool = False) -> set[Kind]:
    """Return the kinds that make `whole` from `pieces`, which have the same shape as `whole`.

    rows: the number of rows of each piece.
    Several kinds fit if the pieces are alike: zeros are the sum of zeros as well as their mean. No kind fits an output
    that compares rows of different pieces.
    """
    found: set[Kind] = set()
    largest = _find_largest(whole, *pieces)
    if all(is_close(whole, piece, largest, loose=loose) for piece in pieces):
        found.add("same")
    if whole.dtype is torch.bool:
        flags = torch.stack(list(pieces))
        return found | {kind for kind in ("all", "any") if torch.equal(getattr(flags, kind)(0), whole)}
    stacked = torch.stack(list(pieces))
    if is_close(whole, stacked.sum(0).to(whole.dtype), largest, loose=loose):
        found.add("sum")
    if whole.is_floating_point() or whole.is_complex():
        shares = torch.tensor(rows, dtype=torch.float64, device=whole.device) / sum(rows)
        mean = (stacked * shares.view(-1, *[1] * whole.ndim)).sum(0).to(whole.dtype)
        if is_close(whole, mean, largest, loose=loose):
            found.add("mean")
    return found


def is_weighted_mean(numbers: dict[str, Tensor]) -> bool:
    """Return whether a number is a mean of its pieces with weights other than rows, such as counts of labels.

    numbers: the number for pieces "a", "b" and "c", and for the joined pieces "ab", "bc" and "abc". If each piece has a
        weight, "ab" and "bc" give all weights up to a common factor, and "abc" must follow from them.
    """
    a, b, c, ab, bc, abc = (float(numbers[name]) for name in ("a", "b", "c", "ab", "bc", "abc"))
    if a == b or b == c:
        return False
    # The share of a in the weights of a and b, and of c in the weights of b and c.
    of_a, of_c = (ab - b) / (a - b), (bc - b) / (c - b)
    # Weights are quotients of differences, which amplify rounding. A share below the tolerance is only rounding and no
    # weight: the median of a and b may be that of b.
    tolerance = 1e-6 if numbers["abc"].dtype is torch.float64 else 1e-3
    if not all(tolerance < share < 1.0 - tolerance for share in (of_a, of_c)):
        return False
    weights = of_a / (1 - of_a), 1.0, of_c / (1 - of_c)
    expected = sum(w * value for w, value in zip(weights, (a, b, c), strict=True)) / sum(weights)
    return abs(expected - abc) <= tolerance * (max(a, b, c) - min(a, b, c))


def find_rows_dim(whole: Sequence[int], pieces: Sequence[Sequence[int]], rows: Sequence[int]) -> tuple[int, int] | None:
    """Return (dimension, each): the dimension that is `each` times as long as there are rows; None if there is none.

    whole: the shape for the sum of `rows`. pieces: the shape for each number of rows.
    """
    if any(len(piece) != len(whole) for piece in pieces):
        return None
    changed = [d for d in range(len(whole)) if any(piece[d] != whole[d] for piece in pieces)]
    if len(changed) != 1:
        return None
    each, rest = divmod(whole[changed[0]], sum(rows))
    held = all(piece[changed[0]] == each * count for piece, count in zip(pieces, rows, strict=True))
    return (changed[0], each) if held and each and not rest else None


def mix_rows(tensor: Tensor, dim: int, each: int = 1, shift: int = 1) -> Tensor:
    """Return as many new rows of the same sort: floats between two rows of the tensor, or another row for other dtypes.

    each: how many entries along `dim` a row has. shift: how far the second of the two rows is from the first.
    A value between two probabilities, masks or images is again such a value. A tensor with only one row is scaled.
    """
    other = tensor.roll(shift * each, dim)
    if not tensor.is_floating_point():
        return other
    if tensor.shape[dim] == each:
        return SHARE * tensor
    # If both values are infinite, as in masks, the interpolation would be NaN.
    return torch.where(tensor == other, tensor, SHARE * tensor + (1 - SHARE) * other)


def _find_largest(*tensors: Tensor) -> float:
    """Return the largest finite magnitude in the floating and complex tensors, or 0."""
    held = [t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    return max((float(t.abs().nan_to_num(nan=0.0, posinf=0.0).max()) for t in held), default=0.0)
