"""Cut a batch into microbatches, and join their outputs. Nothing is padded.

A *row* is one sample of a batch. `rows` lists the number of rows of each microbatch: a batch of 7 rows in 3
microbatches has rows [3, 2, 2]. `dim` is the dimension of a tensor that counts rows, or None if it has no rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Inputs
from fxsplit.ir.facts.capture.chunks import TARGET, ChunkSpec, Replicate, find_stated_dim
from fxsplit.ir.facts.capture.counts import COUNTS_NOTHING, check_nothing_counts, find_miscounted
from fxsplit.ir.facts.capture.output_kinds import ROWS, OutputKind
from fxsplit.runtime.program import DeferredErrors
from fxsplit.runtime.stage.streams import move
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.tensors.accelerators import is_on_host

NOT_THE_SAME = (
    "every microbatch of the example gave the same value and the microbatches of this batch differ, so it may be a "
    "sum: compile with n_microbatches=1, or with an example whose microbatches differ"
)
"""The error of an output that was the same for all microbatches of the example, and is not for this batch."""


def divide_rows(rows: int, n_microbatches: int) -> list[int]:
    """Return the rows of each microbatch: as even as possible, the larger ones first.

    Raises InputError if there are fewer rows than microbatches.
    """
    if rows < n_microbatches:
        raise InputError(
            f"a batch of {rows} rows cannot be cut into n_microbatches={n_microbatches}: give at least "
            f"{n_microbatches} rows (a DataLoader's last batch: drop_last=True) or compile with fewer microbatches"
        )
    return [rows // n_microbatches + (m < rows % n_microbatches) for m in range(n_microbatches)]


def split_target(target: Any, rows: Sequence[int], inputs: Inputs | None = None) -> list[Any]:
    """Return one target for each microbatch: tensors with rows are cut, and all else is repeated.

    A target has its rows on the first dimension, or on the dimension that the option `chunks=` states for "target". A
    stated dimension may have several entries for each row. If `chunks=` states none, and an input has its rows on
    another dimension than the first, then the target's rows are on the only dimension of the right length. The target
    of a batch with one microbatch is returned as it is, unchecked.
    Raises InputError for a tensor with another number of rows.
    """
    if len(rows) == 1:
        return [target]
    leaves, structure = pytree.tree_flatten(target)
    cuts = find_target_cuts(leaves, sum(rows), inputs)
    columns = [cut.split(leaf, rows) for leaf, cut in zip(leaves, cuts, strict=True)]
    # Most targets are one tensor: skip rebuilding the container for each microbatch.
    if isinstance(target, Tensor):
        return list(columns[0])
    return [pytree.tree_unflatten([c[m] for c in columns], structure) for m in range(len(rows))]


def join_target(pieces: Sequence[Any], whole: Any, rows: int, inputs: Inputs | None = None) -> Any:
    """Return the target joined from several microbatches. `whole` is the batch's target, of `rows` rows."""
    if len(pieces) == 1:
        return pieces[0]
    cuts = find_target_cuts(pytree.tree_leaves(whole), rows, inputs)
    columns = zip(*map(pytree.tree_leaves, pieces), strict=True)
    joined = [cut.join(column) for cut, column in zip(cuts, columns, strict=True)]
    return pytree.tree_unflatten(joined, pytree.tree_flatten(pieces[0])[1])


class Targets:
    """The target of each microbatch (`given`), and of the whole batch (`whole`): a tensor, or tensors in containers.

    If a target has tensors both on an accelerator and in host memory, the tensors in host memory are not moved: a loss
    such as CTC needs lengths on the host.
    """

    def __init__(self, given: Sequence[Any], whole: Any = None) -> None:
        self.given = given
        self.whole = whole
        # By thread too: on a GPU, another worker's stream may not have finished the copy yet.
        self._placed: dict[tuple[int, int, torch.device], Any] = {}

    @cached_property
    def are_on_host(self) -> bool:
        """Whether all tensors of the target are in host memory."""
        return all(is_on_host(leaf) for leaf in pytree.tree_leaves(self.given) if isinstance(leaf, Tensor))

    def place(self, microbatch: int, device: torch.device) -> Any:
        """Return the target of a microbatch, with its tensors moved to a device."""
        given = self.given[microbatch]
        # A shortcut for the usual case: every action calls this, and searching containers is slow.
        if isinstance(given, Tensor) and given.device == device:
            return given
        key = threading.get_ident(), microbatch, device
        if key not in self._placed:
            self._placed[key] = pytree.tree_map_only(Tensor, lambda t: self._place(t, device), given)
        return self._placed[key]

    def _place(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return one tensor of a target on a device.

        In a target with tensors both on an accelerator and in host memory, those in host memory stay there (see
        Targets).
        """
        return tensor if is_on_host(tensor) and not self.are_on_host else move(tensor, device)


def find_target_cuts(leaves: Sequence[Any], rows: int, inputs: Inputs | None = None) -> list[ChunkSpec]:
    """Return, for each tensor of a target, the dimension on which the tensor has `rows` rows.

    Raises InputError as `split_target` does.
    """
    stated = find_stated_dim(TARGET, TARGET, inputs.chunks) if inputs else None
    elsewhere = inputs is not None and any(s.cut.dim for s in inputs.specs)
    found: list[ChunkSpec] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or stated is Replicate:
            found.append(ChunkSpec(None))
            continue
        if isinstance(stated, int):
            each, rest = divmod(leaf.shape[stated], rows) if stated < leaf.ndim else (0, 0)
            cuts = [ChunkSpec(stated, each)] if each and not rest else []
        else:
            dims = [d for d, length in enumerate(leaf.shape) if length == rows]
            cuts = [ChunkSpec(d) for d in dims if elsewhere or d == 0]
        # If two dimensions have the right length, either may count the rows.
        if len(cuts) != 1:
            given = "" if stated is None else f", chunks={{'target': {stated}}},"
            raise InputError(
                f"target has shape {tuple(leaf.shape)}{given} and the batch has {rows} rows: give one row of target "
                f"for each row of the input, or {_advise(leaf, rows, stated, inputs)}"
            )
        found += cuts
    return found


def _advise(target: Tensor, rows: int, stated: Any, inputs: Inputs | None) -> str:
    """Return the advice of an error: which dimension the user may state as the target's rows, if one fits."""
    specs = inputs.specs if inputs is not None else ()
    there = target.shape[stated or 0] if (stated or 0) < target.ndim else 0
    ways = [f"{{'target': {d}}}" for d, length in enumerate(target.shape) if d != stated and length == rows]
    # An input may have its rows on another dimension, as in (time, batch, features). The last dimension has features.
    ways += [
        f"{{{spec.name!r}: {d}}}"
        for spec in specs
        for d, length in enumerate(spec.shape[:-1] if spec.dtype.is_floating_point else spec.shape)
        if spec.cut.dim not in (None, d) and length == there > 1
    ]
    if ways:
        return f"state the dimension that holds the rows, compile(chunks={') or compile(chunks='.join(ways[:2])})"
    return "pad tensors of several lengths, such as CTC's targets, or compile with n_microbatches=1"


def join(
    pieces: Sequence[Tensor], rows: Sequence[int], meaning: OutputKind = ROWS, late: DeferredErrors | None = None
) -> Tensor:
    """Return one output of the batch, joined from all microbatches.

    In a mean, each microbatch has the weight of its rows.
    Raises InputError if the pieces do not fit their kind, for example if values of kind "same" differ. If only an
    accelerator knows that, `late` raises the error in a later batch.
    """
    late = late or DeferredErrors()
    if len(pieces) == 1:
        return pieces[0]
    if meaning.kind == "rows":
        for m, (piece, count) in enumerate(zip(pieces, rows, strict=True)):
            if piece.shape[meaning.dim : meaning.dim + 1] != (count * meaning.each,):
                raise InputError(
                    f"it has shape {tuple(piece.shape)} for microbatch {m} of {count} rows: outputs of microbatches "
                    f"are joined on dimension {meaning.dim}; return one row for each row of the input"
                )
        return torch.cat(list(pieces), meaning.dim)
    if meaning.kind == "unjoined":
        raise InputError(meaning.why)
    if meaning.kind == "same":
        if any(piece.shape != pieces[0].shape for piece in pieces):
            raise InputError(NOT_THE_SAME)
        late.expect(torch.stack([_differs(piece, pieces[0]) for piece in pieces[1:]]).any(), NOT_THE_SAME)
        return pieces[0]
    stacked = torch.stack(list(pieces))
    if meaning.kind in ("all", "any"):
        return stacked.all(0) if meaning.kind == "all" else stacked.any(0)
    if meaning.kind == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    weights = meaning.list_weights(rows)
    for m in (m for m, weight in enumerate(weights) if not isinstance(weight, Tensor) and not weight):
        check_nothing_counts(pieces[m], f"that of microbatch {m}")
    unknown = [weight.to(stacked) for weight in weights if isinstance(weight, Tensor)]
    if unknown:
        numbers = stacked.reshape(len(pieces), -1)
        late.expect(find_miscounted(numbers, torch.stack(unknown).unsqueeze(1)), COUNTS_NOTHING)
    pairs = zip(pieces, weights, strict=True)
    return torch.stack([_scale(piece, weight) for piece, weight in pairs]).sum(0)


def _scale(piece: Tensor, weight: float | Tensor) -> Tensor:
    """Return a microbatch's part of a mean, which is the piece times its weight.

    For weight zero it is zero, even for NaN.
    """
    if isinstance(weight, Tensor):
        weight = weight.to(piece.device)
        return (piece.double() * weight).where(weight != 0, 0.0).to(piece.dtype)
    return piece * weight if weight else torch.zeros_like(piece)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Return a tensor with one flag: whether two tensors of the same shape differ by more than rounding."""
    if not a.is_floating_point():
        return (a != b).any()
    return ~torch.isclose(a, b, rtol=1e-4, equal_nan=True).all()


def split_gradient(gradient: Tensor, rows: Sequence[int], meaning: OutputKind = ROWS) -> Sequence[Tensor | None]:
    """Return the gradient of each piece that `join` has joined, from the gradient of the joined output.

    None instead of a gradient means that the piece gets no gradient.
    """
    if len(rows) == 1:
        return [gradient]
    if meaning.kind == "rows":
        return meaning.cut.split(gradient, rows)
    if meaning.kind == "sum":
        return [gradient] * len(rows)
    # Every microbatch computes an output of kind "same", so their shares of its gradient add up to one.
    weights = meaning.list_weights(rows)
    # The host does not know whether a weight on an accelerator is zero. The product is then a gradient of zeros.
    return [
        gradient * weight.to(gradient) if isinstance(weight, Tensor) else gradient * weight if weight else None
        for weight in weights
    ]
