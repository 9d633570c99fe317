"""Chunks: the dimension of each tensor argument that is cut into microbatches.

`chunks={"x": 1, "mask": fxsplit.Replicate}` cuts x along its second dimension; every microbatch gets the whole mask.
Dimensions that the caller does not state are found from the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxsplit.errors import InputError, suggest
from fxsplit.system.figures import show


class Replicate:
    """Stands in `chunks=` in place of a dimension: every microbatch gets the whole tensor."""


Chunks = Mapping[str, "int | type[Replicate]"]
"""The dimension to cut into microbatches, or Replicate, for each argument or part of an argument."""
TARGET = "target"
"""The name under which `chunks` states the dimension of the target of `step`."""


class ChunkSpec(NamedTuple):
    """The batch dimension of a tensor (`dim`), and how many entries along it each row has (`each`).

    dim: None for a tensor without rows, which every microbatch gets whole.
    """

    dim: int | None
    each: int = 1

    def narrow(self, tensor: Tensor, start: int, rows: int) -> Tensor:
        """Return `rows` rows of a tensor, from row `start` on, as a view."""
        return tensor if self.dim is None else tensor.narrow(self.dim, start * self.each, rows * self.each)

    def split(self, tensor: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a tensor cut into pieces, as views. `rows`: the number of rows of each piece."""
        if self.dim is None:
            return (tensor,) * len(rows)
        return torch.split(tensor, [count * self.each for count in rows], self.dim)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the tensor that consists of the rows of all pieces, in order."""
        return pieces[0] if self.dim is None else torch.cat(list(pieces), self.dim)


def check_chunks(chunks: object) -> None:
    """Raise InputError unless `chunks` is None, or a mapping from names to dimensions or Replicate."""
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
    """Return the batch dimension of each tensor.

    roots: for each tensor, the name of the argument that holds it.
    A dimension that `chunks` does not state is found as follows. The first tensor that has a dimension to cut gives the
    number of rows. A tensor with this length in its first dimension is cut there. A tensor without a dimension of this
    length is replicated. If `chunks` states several dimensions, the shortest gives the number of rows; a dimension four
    times as long has four entries for each row.
    Raises InputError for a tensor with this length in another dimension, which may or may not be the batch; for names
    in `chunks` that are not arguments; and for dimensions that a tensor does not have.
    """
    stated = {name: find_stated_dim(name, roots[name], chunks) for name in tensors}
    # An argument that is None now may be a tuple or dict of tensors in another call.
    absent = tuple(f"{name}_" for name in roots if name not in tensors)
    for key in chunks:
        if key != TARGET and key not in tensors and key not in roots.values() and not key.startswith(absent):
            raise InputError(
                f"chunks={{{key!r}: ...}} names no tensor argument: there are {', '.join(tensors)}"
                f"{suggest(key, {*tensors, *roots.values()})}"
            )
    for name, dim in stated.items():
        if isinstance(dim, int) and not 0 <= dim < tensors[name].ndim:
            raise InputError(f"chunks={{{name!r}: {dim}}}: it has shape {tuple(tensors[name].shape)}")
    # Stated dimensions come first: the caller knows where the rows are, and the first tensor may be something else.
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
            # A length that is no multiple is refused when rows are counted, as in every later call.
            found[name] = (
                ChunkSpec(rule, max(lengths[name] // max(rows, 1), 1)) if isinstance(rule, int) else ChunkSpec(None)
            )
        elif tensor.ndim and tensor.shape[0] == rows:
            found[name] = ChunkSpec(0)
        # With one row, every dimension of length 1 would be in doubt, and few of them are a batch.
        elif rows in tensor.shape and rows > 1:
            place = list(tensor.shape).index(rows)
            # One rule for all parts of an argument, such as (h, c) of an LSTM, if it fits them all.
            alike = [t.shape for n, t in tensors.items() if roots[n] == roots[name]]
            key = roots[name] if all(rows in shape and list(shape).index(rows) == place for shape in alike) else name
            raise InputError(
                f"argument {name!r} has shape {tuple(tensor.shape)} and {first!r} has {rows} rows: state whether its "
                f"batch is in dimension {place}, chunks={{{key!r}: {place}}}, or shared by all, "
                f"chunks={{{key!r}: fxsplit.Replicate}}"
            )
    return found


def find_stated_dim(name: str, root: str, chunks: Chunks) -> int | type[Replicate] | None:
    """Return what `chunks` states for a tensor, by its own name or by the argument that holds it; None if nothing.

    Raises InputError for a value that is not a dimension.
    """
    rule = chunks.get(name, chunks.get(root))
    if rule is None:
        return None
    if rule is not Replicate and type(rule) is not int:  # True is an int, but not a dimension
        raise InputError(f"chunks={{{name!r}: {rule!r}}}: give the number of a dimension, or fxsplit.Replicate")
    return rule
