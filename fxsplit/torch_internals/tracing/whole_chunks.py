"""Chunk lengths: simplify the division of a padded length by its number of chunks.

Linear attention pads a length `s` to `e = s + (64 - s % 64) % 64`, counts `e // 64` chunks, and computes the length of
each chunk as `e // (e // 64)`. torch does not see that this is 64. Each view of a chunk then has a symbolic size, and
every check of that size is algebra.

To prove it, use that `e` modulo 64 is periodic in `s`: `e` is a multiple of 64 for every `s` if it is a multiple for
each `s` of one period.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from fxsplit.torch_internals.scopes.patch import Method

LONGEST = 4096
"""The longest period to check. Each value of the period takes one evaluation."""


def divide_by_count(divide: Method, kind: type, base: Any, divisor: Any) -> Any:
    """Return the chunk length if `divisor` counts chunks of `base`, else `base // divisor` as computed by `divide`."""
    if isinstance(divisor, FloorDiv) and divisor.args[0] == base:
        length = divisor.args[1]
        # `base` is positive and a multiple of the length, so there is at least one chunk, and no division by 0.
        if length.is_Integer and length > 0 and base.is_positive and is_multiple(base, int(length)):
            return length
    return divide(kind, base, divisor)


@lru_cache(maxsize=256)
def is_multiple(size: Any, of: int) -> bool:
    """Return whether an expression of one integer symbol is provably a multiple of `of` for every value."""
    symbols = size.free_symbols
    period = _find_period(size, of)
    if period is None or len(symbols) > 1 or not all(symbol.is_integer for symbol in symbols):
        return False
    return all(_evaluate(size, value) % of == 0 for value in range(period))


def _find_period(size: Any, modulo: int) -> int | None:
    """Return after how many values of its symbol an expression repeats modulo a number; None if unknown."""
    if size.is_Integer:
        return 1
    if size.is_Symbol:
        return modulo
    if isinstance(size, Mod | PythonMod):
        inner, by = size.args
        return _find_period(inner, int(by)) if by.is_Integer and by > 0 else None
    if not isinstance(size, sympy.Add | sympy.Mul):
        return None
    periods = [_find_period(part, modulo) for part in size.args]
    known = [period for period in periods if period is not None]
    period = lcm(*known)
    return period if len(known) == len(periods) and period <= LONGEST else None


def _evaluate(size: Any, value: int) -> int:
    """Evaluate a size, a sum of products and remainders of one symbol, for a value of the symbol."""
    if size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return value
    parts = [_evaluate(part, value) for part in size.args]
    if isinstance(size, Mod | PythonMod):
        return parts[0] % parts[1]
    return sum(parts) if isinstance(size, sympy.Add) else int(sympy.prod(parts))
