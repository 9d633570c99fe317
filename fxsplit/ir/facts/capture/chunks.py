"""Chunks: which dimension of each tensor argument is cut into microbatches.

`chunks={"x": 1, "mask": fxsplit.Replicate}` cuts x along its second dimension; every microbatch gets the whole mask.
What the caller does not state is found from the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import show


class Replicate:
    """Stands for a dimension in `chunks=`: every microbatch gets the whole tensor."""


Chunks = Mapping[str, "int | type[Replicate]"]
"""By argument, or part of one: the dimension that is cut into microbatches, or Replicate."""
TARGET = "target"
"""What the target of `step` is called in `chunks`."""


class ChunkSpec(NamedTuple):
    """Where a tensor has the rows: the dimension, and how many entries each row has there.

    `dim` is None for a tensor without rows, which every microbatch gets whole.
    """

    dim: int | None
    each: int = 1

    def narrow(self, tensor: Tensor, start: int, rows: int) -> Tensor:
        """Return so many rows of a tensor, from row `start` on, as a view."""
        return tensor if self.dim is None else tensor.narrow(self.dim, start * self.each, rows * self.each)

    def split(self, tensor: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the pieces of a tensor that have so many rows each, as views."""
        if self.dim is None:
            return (tensor,) * len(rows)
        return torch.split(tensor, [count * self.each for count in rows], self.dim)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the tensor that is made of pieces with its rows."""
        return pieces[0] if self.dim is None else torch.cat(list(pieces), self.dim)


def check_chunks(chunks: object) -> None:
    """Raise InputError for what no call could be cut by: what is no mapping, or holds what is no dimension."""
    if chunks is None:
        return
    if not isinstance(chunks, Mapping):
        raise InputError(
            f"chunks={show(chunks)}: give a dimension for each argument by its name, such as {{'x': 1}}; the number of "
            "microbatches is n_microbatches="
        )
    for name in chunks:
        if not isinstance(name, str):
            raise InputError(f"chunks={{{show(name)}: ...}}: give the name of an argument")
        find_stated_dim(name, name, chunks)


def find_cuts(tensors: Mapping[str, Tensor], roots: Mapping[str, str], chunks: Chunks) -> dict[str, ChunkSpec]:
    """Return where each tensor has the rows of the batch.

    `roots` is the argument that each tensor is in. What `chunks` does not state is found: the first tensor that has a
    dimension to cut tells the number of rows. A tensor with as many in its first dimension is cut there. A tensor with
    that length nowhere is replicated. Where `chunks` states several dimensions, the shortest tells the number of rows;
    one that is four times as long has four entries for each row.

    Raises InputError for a tensor that has the length in another dimension, which may be either; for names in `chunks`
    that are no argument; and for dimensions that a tensor does not have.
    """
    stated = {name: find_stated_dim(name, roots[name], chunks) for name in tensors}
    for key in chunks:
        if key != TARGET and key not in tensors and key not in roots.values():
            raise InputError(
                f"chunks={{{key!r}: ...}} names no tensor argument: there are {', '.join(tensors)}"
                f"{suggest(key, {*tensors, *roots.values()})}"
            )
    for name, dim in stated.items():
        if isinstance(dim, int) and not 0 <= dim < tensors[name].ndim:
            raise InputError(f"chunks={{{name!r}: {dim}}}: it has shape {tuple(tensors[name].shape)}")
    # Stated dimensions first: the caller knows where the rows are, and the first tensor may be something else.
    known = [(n, d) for n, d in stated.items() if isinstance(d, int)]
    known += [(n, 0) for n, t in tensors.items() if stated[n] is None and t.ndim]
    found = dict.fromkeys(tensors, ChunkSpec(None))
    if not known:
        return found
    lengths = {n: tensors[n].shape[d] for n, d in known if stated[n] is not None}
    first = min(lengths, key=lengths.__getitem__, default=known[0][0])
    rows = lengths.get(first, tensors[first].shape[known[0][1]])
    for name, tensor in tensors.items():
        rule = stated[name]
        if rule is not None:
            # A length that is no multiple is refused when rows are counted, as it is in every later call.
            found[name] = (
                ChunkSpec(rule, max(lengths[name] // max(rows, 1), 1)) if isinstance(rule, int) else ChunkSpec(None)
            )
        elif tensor.ndim and tensor.shape[0] == rows:
            found[name] = ChunkSpec(0)
        # With one row every dimension of length 1 would be in doubt, which is seldom a batch.
        elif rows in tensor.shape and rows > 1:
            place = list(tensor.shape).index(rows)
            raise InputError(
                f"argument {name!r} has shape {tuple(tensor.shape)} and {first!r} has {rows} rows: state whether its "
                f"batch is in dimension {place}, chunks={{{name!r}: {place}}}, or shared by all, "
                f"chunks={{{name!r}: fxsplit.Replicate}}"
            )
    return found


def find_stated_dim(name: str, root: str, chunks: Chunks) -> int | type[Replicate] | None:
    """Return what `chunks` says of a tensor, by its name or else by that of the argument that it is in.

    Returns None where it says nothing, and raises InputError for what is no dimension.
    """
    rule = chunks.get(name, chunks.get(root))
    if rule is None:
        return None
    if rule is not Replicate and type(rule) is not int:  # True is an int, and no dimension
        raise InputError(f"chunks={{{name!r}: {rule!r}}}: give the number of a dimension, or fxsplit.Replicate")
    return rule
