"""Compressed cuts: in how many bytes values, and their gradients, cross from one device to another.

- `bf16`: float32 and float64 are rounded to bfloat16
- `int8`: floats become whole numbers from -127 to 127, times a scale for each row

A *row* is a part of a tensor that lies together: the last dimension, or so many of the last ones as hold ROW elements,
but never more than one row of the batch. The scale of a row has the dtype of its elements.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Literal, get_args

from fxsplit.errors import InputError, suggest

Compress = Literal["bf16", "int8"]
HOW: tuple[Compress, ...] = get_args(Compress)
"""The ways to compress what crosses a cut."""
ROW = 64
"""A row has so many elements at least, where the tensor's rows of the batch have: its scale is one more."""
LEAST_ROW = 4
"""Tensors with shorter rows, such as one number for each row of the batch, are not compressed to int8."""
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The bytes of an element of each dtype that int8 compresses; bf16 compresses those that are wider than its own."""

_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")


def check_compress(how: object) -> None:
    """Raise InputError for what is no way to compress; None is none."""
    if how not in (None, *HOW):
        raise InputError(f"compress={how!r}: give {' or '.join(map(repr, HOW))}, or leave it out{suggest(how, HOW)}")


def is_compressed(how: str, dtype: str, shape: Sequence[int]) -> bool:
    """Return whether values of a dtype, such as `float32`, and a shape are compressed."""
    width = WIDTHS.get(dtype, 0)
    if how == "int8":
        # The scales of very short rows would take more than is saved.
        return width > 0 and find_row_length(shape) >= LEAST_ROW
    return how == "bf16" and width > WIDTHS["bfloat16"]


def find_row_length(shape: Sequence[int]) -> int:
    """Return how many elements of a tensor have one scale together."""
    length = 1
    # The first dimension is that of the batch, whose rows know nothing of each other.
    for size in reversed(shape[1:]):
        if length >= ROW:
            break
        length *= size
    return max(1, length)


def count_sent_bytes(how: str, made: str, own_bytes: float) -> float:
    """Return in how many bytes a value crosses; `made` is its dtype and shape, as `float32[8, 64]`.

    A value that is not compressed, or of which nobody knows, has its `own_bytes`.
    """
    # A value without a gradient, or of which only the type is known, is of no shape.
    found = _TENSOR.fullmatch(made)
    if not own_bytes or found is None:
        return own_bytes
    shape = [int(size) for size in found[2].split(",") if size.strip()]
    if not is_compressed(how, found[1], shape):
        return own_bytes
    count = prod(shape)
    if how == "bf16":
        return float(count * WIDTHS["bfloat16"])
    return float(count + WIDTHS[found[1]] * (count // find_row_length(shape)))
