"""Compressed cuts: the bytes in which values and their gradients cross from one device to another.

- `bf16`: float32 and float64 are rounded to bfloat16
- `int8`: floats become whole numbers from -127 to 127, times a scale for each row

A *row* is a contiguous part of a tensor: as many of the last dimensions as are needed for ROW elements, but never more
than one row of the batch. The scale of a row has the dtype of its elements.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Literal, get_args

from fxsplit.errors import InputError, suggest

Compress = Literal["bf16", "int8"]
HOW: tuple[Compress, ...] = get_args(Compress)
"""The ways to compress values that cross cuts."""
ROW = 64
"""The least number of elements in a row, unless a row of the batch has fewer. Each row adds one scale."""
LEAST_ROW = 4
"""Tensors with shorter rows, such as one number for each row of the batch, are not compressed to int8."""
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The bytes of an element of each dtype that int8 compresses; bf16 compresses the dtypes wider than itself."""

_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")


def parse_tensor(made: str) -> tuple[str, list[int]] | None:
    """Return the dtype and the shape in a text such as `float32[8, 64]`; None for a text of another form."""
    found = _TENSOR.fullmatch(made)
    return None if found is None else (found[1], [int(size) for size in found[2].split(",") if size.strip()])


def check_compress(how: object) -> None:
    """Raise InputError unless `how` is a way to compress, or None for no compression."""
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
    """Return the number of elements of a tensor that share one scale."""
    length = 1
    # The first dimension is the batch, and rows of the batch share no scale.
    for size in reversed(shape[1:]):
        if length >= ROW:
            break
        length *= size
    return max(1, length)


def count_sent_bytes(how: str, made: str, own_bytes: float) -> float:
    """Return the bytes in which a value crosses a cut.

    made: its dtype and shape, such as `float32[8, 64]`.
    own_bytes: the bytes of a value that is not compressed, or whose dtype and shape are unknown.
    """
    # There is no gradient, or only the type of the value is known.
    found = parse_tensor(made)
    if not own_bytes or found is None:
        return own_bytes
    dtype, shape = found
    if not is_compressed(how, dtype, shape):
        return own_bytes
    count = prod(shape)
    if how == "bf16":
        return float(count * WIDTHS["bfloat16"])
    return float(count + WIDTHS[dtype] * (count // find_row_length(shape)))
