"""Agreement: which meanings an output has on one batch, from its values for the whole batch and for its pieces.

Where the batch leaves that open, `mix_rows` makes other rows of the same kind to try.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit.ir.facts.capture.output_kinds import Kind

TOLERANCE = 2e-6
"""How far two numbers may differ, as a share of the largest: kernels sum in another order for another number of rows.
What a model of lower precision computes is compared in double precision, or else within `LOOSE`."""
LOOSE = 1e-4
LOOSE_IN_HALF = 5e-2
SHARE = 0.7
"""The share of its own row in a mixed one."""


def is_close(a: Tensor, b: Tensor, largest: float | None = None, *, loose: bool = False) -> bool:
    """Return whether two tensors of one shape are equal but for rounding, on the scale of the `largest` value."""
    if not (a.is_floating_point() or a.is_complex()) or a.numel() == 0:
        return torch.equal(a, b)
    size = _find_largest(a, b) if largest is None else largest
    tolerance = TOLERANCE if not loose else LOOSE_IN_HALF if a.dtype.itemsize < 4 else LOOSE
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def list_kinds(whole: Tensor, pieces: Sequence[Tensor], rows: Sequence[int], *, loose: bool = False) -> set[Kind]:
    """Return how `whole` may follow from `pieces` of so many `rows`, which all have one shape, such as a number's.

    There are several answers where the pieces are alike: zeros are the sum of zeros as well as their mean. There is
    none for an output that compares rows of different pieces.
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
    """Return whether a number is a mean of its pieces whose weights are the pieces' own, such as counts of labels.

    `numbers` has the number for pieces "a", "b" and "c", and for "ab", "bc" and "abc". If each piece has a weight, then
    "ab" and "bc" tell all weights but for a factor, and "abc" follows from them.
    """
    a, b, c, ab, bc, abc = (float(numbers[name]) for name in ("a", "b", "c", "ab", "bc", "abc"))
    if a == b or b == c:
        return False
    # The share of a in the weights of a and b, and the share of c in those of b and c.
    of_a, of_c = (ab - b) / (a - b), (bc - b) / (c - b)
    # Weights are quotients of differences, and so is what rounding makes of them. A share that is rounding alone is
    # none: the median of a and b may be that of b.
    tolerance = 1e-6 if numbers["abc"].dtype is torch.float64 else 1e-3
    if not all(tolerance < share < 1.0 - tolerance for share in (of_a, of_c)):
        return False
    weights = of_a / (1 - of_a), 1.0, of_c / (1 - of_c)
    expected = sum(w * value for w, value in zip(weights, (a, b, c), strict=True)) / sum(weights)
    return abs(expected - abc) <= tolerance * (max(a, b, c) - min(a, b, c))


def find_rows_dim(whole: Sequence[int], pieces: Sequence[Sequence[int]], rows: Sequence[int]) -> tuple[int, int] | None:
    """Return the dimension that is as long as there are rows, or `each` times as long, and `each`; None if none is.

    `whole` and `pieces` are shapes, for the sum of `rows` and for each of them.
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
    """Return as many other rows of the same kind: floats between those of two rows, all else as in another row.

    Each row has `each` entries along `dim`. What lies between two probabilities, masks or images is one again. A single
    row is scaled.
    """
    other = tensor.roll(shift * each, dim)
    if not tensor.is_floating_point():
        return other
    if tensor.shape[dim] == each:
        return SHARE * tensor
    # Where both are infinite, as in masks, their difference would be no number.
    return torch.where(tensor == other, tensor, SHARE * tensor + (1 - SHARE) * other)


def _find_largest(*tensors: Tensor) -> float:
    """Return the largest finite magnitude among floating tensors."""
    held = [t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    return max((float(t.abs().nan_to_num(nan=0.0, posinf=0.0).max()) for t in held), default=0.0)
