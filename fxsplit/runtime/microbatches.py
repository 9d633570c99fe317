"""Cut a batch into microbatches, and join what comes out. Nothing is padded.

A *row* is one sample of a batch, and `rows` has the number of rows of each microbatch: a batch of 7 rows in 3
microbatches has rows [3, 2, 2]. `dim` is the dimension of a tensor that its rows lie on, None where it has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.chunks import TARGET, Replicate, find_stated_dim
from fxsplit.torch_internals import pytree


def divide_rows(rows: int, n_microbatches: int) -> list[int]:
    """Return the rows of each microbatch: as even as possible, the larger ones first.

    Raises InputError when there are fewer rows than microbatches.
    """
    if rows < n_microbatches:
        raise InputError(
            f"a batch of {rows} rows cannot be cut into n_microbatches={n_microbatches}: give at least "
            f"{n_microbatches} rows (a DataLoader's last batch: drop_last=True) or compile with fewer microbatches"
        )
    return [rows // n_microbatches + (m < rows % n_microbatches) for m in range(n_microbatches)]


def split(tensor: Tensor, rows: Sequence[int], dim: int | None = 0) -> tuple[Tensor, ...]:
    """Return the microbatches of one tensor, as views. Where it has no rows, each microbatch gets all of it."""
    return (tensor,) * len(rows) if dim is None else torch.split(tensor, list(rows), dim)


def split_target(target: Any, rows: Sequence[int], inputs: Inputs | None = None) -> list[Any]:
    """Return one target for each microbatch: tensors are cut where they have the rows, everything else is repeated.

    Tensors have them on their first dimension, or on the one that `chunks=` states for "target". Where an input has its
    rows on another dimension than the first, and `chunks=` states none, it is the only dimension of the rows' length.
    Raises InputError when a tensor has another number of rows than the batch.
    """
    leaves, structure = pytree.tree_flatten(target)
    stated = find_stated_dim(TARGET, TARGET, inputs.chunks) if inputs else None
    elsewhere = inputs is not None and any(s.batch_dim for s in inputs.specs)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or stated is Replicate:
            columns.append([leaf] * len(rows))
            continue
        dims = [d for d, length in enumerate(leaf.shape) if length == sum(rows)]
        wanted = [d for d in dims if d == (stated or 0)] if isinstance(stated, int) or not elsewhere else dims
        # Two dimensions of the right length leave open which has the rows.
        if len(wanted) != 1:
            raise InputError(
                f"target has shape {tuple(leaf.shape)} and the batch has {sum(rows)} rows: give one row of target for "
                "each row of the input, or state the dimension that holds them, chunks={'target': 1}"
            )
        columns.append(split(leaf, rows, wanted[0]))
    return [pytree.tree_unflatten([c[m] for c in columns], structure) for m in range(len(rows))]


def join(pieces: Sequence[Tensor], rows: Sequence[int], dim: int | None = 0) -> Tensor:
    """Return the microbatches of one tensor as one. Numbers without rows, such as losses, give their weighted mean.

    The weight of a microbatch is its share of the rows.
    """
    if len(pieces) == 1:
        return pieces[0]
    if dim is None:
        return torch.stack([piece * (count / sum(rows)) for piece, count in zip(pieces, rows, strict=True)]).sum()
    return torch.cat(list(pieces), dim)


def split_gradient(gradient: Tensor, rows: Sequence[int], dim: int | None = 0) -> Sequence[Tensor]:
    """Return the gradient of each piece that `join` was given, from the gradient of its result."""
    if len(rows) == 1:
        return [gradient]
    if dim is None:
        return [gradient * (count / sum(rows)) for count in rows]
    return split(gradient, rows, dim)
