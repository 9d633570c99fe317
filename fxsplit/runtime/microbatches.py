"""Cut a batch into microbatches and join what comes out; nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxsplit.errors import InputError

MICROBATCHES_PER_DEVICE = 2
ROWS_PER_MICROBATCH = 4
"""Unless stated, two microbatches a device, but one where they would have fewer rows than this: more microbatches fill
the pipeline better, and small ones waste work and make batch norm's statistics noisy."""


def default_microbatches(rows: int, devices: int) -> int:
    """Return how many microbatches to cut a batch into where the user does not say."""
    return min(rows, MICROBATCHES_PER_DEVICE * devices, max(devices, rows // ROWS_PER_MICROBATCH))


def sizes(rows: int, n_microbatches: int) -> list[int]:
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
    """Return the microbatches of one tensor, as views; where it has no rows, all of it for each."""
    return (tensor,) * len(rows) if dim is None else torch.split(tensor, list(rows), dim)


def split_tree(value: Any, rows: Sequence[int], what: str) -> list[Any]:
    """Return one tree for each microbatch: tensors are cut on dimension 0, everything else is repeated.

    Raises InputError when a tensor has another number of rows than the batch.
    """
    leaves, structure = pytree.tree_flatten(value)
    columns: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            columns.append([leaf] * len(rows))
            continue
        if leaf.ndim == 0 or leaf.shape[0] != sum(rows):
            raise InputError(
                f"{what} has shape {tuple(leaf.shape)} and the batch has {sum(rows)} rows: give one row of {what} "
                "for each row of the input"
            )
        columns.append(split(leaf, rows))
    return [pytree.tree_unflatten([c[m] for c in columns], structure) for m in range(len(rows))]


def join(pieces: Sequence[Tensor], rows: Sequence[int], dim: int | None = 0) -> Tensor:
    """Return the microbatches of one tensor as one; of numbers, such as losses, the mean weighted by rows."""
    if len(pieces) == 1:
        return pieces[0]
    if dim is None:
        return torch.stack([piece * (count / sum(rows)) for piece, count in zip(pieces, rows, strict=True)]).sum()
    return torch.cat(list(pieces), dim)


def spread(gradient: Tensor, rows: Sequence[int], dim: int | None = 0) -> Sequence[Tensor]:
    """Return the gradient of each piece, from that of what `join` made of them."""
    if dim is None:
        return [gradient * (count / sum(rows)) for count in rows]
    return split(gradient, rows, dim)
