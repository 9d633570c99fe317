"""Rows of a batch for trials of a model: pieces of the batch, additional rows, and other rows of the same sort."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit.ir.facts.capture.agreement import mix_rows
from fxsplit.ir.facts.capture.call import Inputs


def cut_pieces(inputs: Inputs, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[list[Tensor]]:
    """Return the tensors of each microbatch, given their numbers of rows."""
    columns = [spec.cut.split(t, rows) for spec, t in zip(inputs.specs, tensors, strict=True)]
    return [[column[m] for column in columns] for m in range(len(rows))]


def join_pieces(inputs: Inputs, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the tensors of several pieces, joined into one piece."""
    return [spec.cut.join(column) for spec, *column in zip(inputs.specs, *pieces, strict=True)]


def add_rows(inputs: Inputs, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Return the tensors with `rows` additional rows, which are mixed from the existing ones."""
    batch = inputs.count_rows(tensors)
    mixed = mix_batch(inputs, tensors, 1)
    # Cyclically, since there may be fewer rows than are to be added.
    order = [i % batch for i in range(rows)]
    return [
        spec.cut.join([t, *(spec.cut.narrow(m, i, 1) for i in order)])
        for spec, t, m in zip(inputs.specs, tensors, mixed, strict=True)
    ]


def mix_batch(inputs: Inputs, tensors: Sequence[Tensor], shift: int) -> list[Tensor]:
    """Return the same number of other rows of the same sort; see `mix_rows`."""
    pairs = zip(inputs.specs, tensors, strict=True)
    return [t if s.cut.dim is None else mix_rows(t, s.cut.dim, s.cut.each, shift) for s, t in pairs]


def tell_rows_apart(inputs: Inputs, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, with changed rows for a tensor whose floats are all the same number, as from torch.ones.

    With equal rows, a mean over rows could not be told from a maximum. The new rows lie between half the number and the
    number, or between 0.5 and 1 if the number is zero.
    """
    made = []
    for spec, t in zip(inputs.specs, tensors, strict=True):
        alike = spec.cut.dim is not None and t.is_floating_point() and bool((t == t.flatten()[:1]).all())
        if not alike:
            made.append(t)
            continue
        rows = t.shape[spec.cut.dim or 0]
        shape = [rows if d == spec.cut.dim else 1 for d in range(t.ndim)]
        scale = torch.linspace(0.5, 1.0, rows, dtype=t.dtype, device=t.device).view(shape)
        made.append((torch.ones_like(t) if not t.any() else t) * scale)
    return made
