"""Chunks: which dimension of each tensor argument is cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxsplit.errors import InputError


class Replicate:
    """Stands for a dimension in `chunks=`: every microbatch gets the whole tensor."""


Chunks = Mapping[str, "int | type[Replicate]"]
"""By argument, or part of one: the dimension that is cut into microbatches, or Replicate."""
UNJOINED = -1
"""In place of an output's dimension: its rows depend on each other, so that it is right for whole batches alone."""
TARGET = "target"
"""What the target of `step` is called in `chunks`."""


def find_batch_dims(tensors: Mapping[str, Tensor], roots: Mapping[str, str], chunks: Chunks) -> dict[str, int | None]:
    """Return, for each tensor, the dimension that holds the batch; None where every microbatch gets all of it.

    `roots` is the argument that each tensor is in. What is not stated is found: the rows are those of the first tensor.
    A tensor with as many in its first dimension is cut there, one that has them nowhere is replicated, and one that has
    them elsewhere must be stated.
    """
    stated = {name: find_stated_dim(name, roots[name], chunks) for name in tensors}
    for key in chunks:
        if key != TARGET and key not in tensors and key not in roots.values():
            raise InputError(f"chunks={{{key!r}: ...}} names no tensor argument: there are {', '.join(tensors)}")
    for name, dim in stated.items():
        if isinstance(dim, int) and not 0 <= dim < tensors[name].ndim:
            raise InputError(f"chunks={{{name!r}: {dim}}}: it has shape {tuple(tensors[name].shape)}")
    known = [(n, d) for n, d in stated.items() if isinstance(d, int)]
    known += [(n, 0) for n, t in tensors.items() if stated[n] is None and t.ndim]
    if not known:
        return dict.fromkeys(tensors)
    first, dim = known[0]
    rows = tensors[first].shape[dim]
    found: dict[str, int | None] = {}
    for name, tensor in tensors.items():
        if stated[name] is not None:
            found[name] = stated[name] if isinstance(stated[name], int) else None  # type: ignore[assignment]
        elif tensor.ndim and tensor.shape[0] == rows:
            found[name] = 0
        elif rows in tensor.shape and rows > 1:
            raise InputError(
                f"argument {name!r} has shape {tuple(tensor.shape)} and {first!r} has {rows} rows: state whether its "
                f"batch is in dimension {list(tensor.shape).index(rows)}, chunks={{{name!r}: "
                f"{list(tensor.shape).index(rows)}}}, or shared by all, chunks={{{name!r}: fxsplit.Replicate}}"
            )
        else:
            found[name] = None
    return found


def find_stated_dim(name: str, root: str, chunks: Chunks) -> int | type[Replicate] | None:
    """Return what `chunks` says of a tensor, by its name or else by that of the argument that it is in."""
    rule = chunks.get(name, chunks.get(root))
    if rule is None:
        return None
    if rule is not Replicate and type(rule) is not int:
        raise InputError(f"chunks={{{name!r}: {rule!r}}}: give the number of a dimension, or fxsplit.Replicate")
    return rule
