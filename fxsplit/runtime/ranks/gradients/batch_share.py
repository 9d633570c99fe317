"""Batch shares: the part of a batch that each data-parallel pipeline computes.

The share gives the weight of the pipeline's loss and gradients. For a loss that is a mean over rows, the weight follows
from the pipeline's rows. For a mean over labels it follows from the pipeline's labels. For a sum the weight is 1.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.counts import Count, CountWatch
from fxsplit.runtime.backends.backend import JobRequest
from fxsplit.runtime.loss.loss import BatchLoss, find_loss_meaning
from fxsplit.runtime.microbatches import split_target
from fxsplit.runtime.program import Batch

Cutting = Callable[[Sequence[int]], tuple[Sequence[Sequence[Any]], Sequence[Any]]]
"""From the numbers of rows of pieces: the inputs from which entries are counted, for each piece and for the whole."""


class LossReduction(IntEnum):
    """How the losses of data-parallel pipelines combine to the loss of the mesh.

    If pipelines report different kinds, the kind with the largest number is used for all.
    """

    UNKNOWN = -1  # on ranks without the last stage
    MEAN = 0  # over rows
    SUM = 1
    COUNTED = 2  # a sum, divided by a count
    COUNTED_ROWS = 3  # a mean over rows, divided by a count
    WATCHED = 4  # uses counts in other ways too: a mean if every pipeline counts the same in each row
    OTHER = 5  # divides by a count in an unknown way
    OPEN = 6  # not known before the first microbatch of the first step
    COMPARED = 7  # compares rows with each other


class BatchShare(NamedTuple):
    """The share of one pipeline: its rows, its microbatches, and the number that its loss divides by.

    kind: how the losses of pipelines combine, a LossReduction.
    counted: the number that the loss divides by, if it is a count. For kind WATCHED, a checksum that is equal on
        pipelines with equal counts in each row.
    """

    rows: int
    n_microbatches: int
    kind: int = LossReduction.UNKNOWN
    counted: float = 0.0

    def to_numbers(self) -> list[int]:
        """Return the share as 64-bit integers, to send to other ranks."""
        return [self.rows, self.n_microbatches, self.kind, *struct.unpack("q", struct.pack("d", self.counted))]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> BatchShare:
        """Return the share from the integers of `to_numbers`."""
        rows, n_microbatches, kind, bits = numbers
        return cls(rows, n_microbatches, kind, *struct.unpack("d", struct.pack("q", bits)))


def find_batch_share(request: JobRequest, *, has_loss: bool, ended: bool) -> BatchShare:
    """Return this pipeline's share of the batch in a call, as far as this rank knows it.

    has_loss: whether this rank computes the loss. ended: whether all microbatches have been computed.
    """
    batch, loss = request.batch, request.loss
    found = BatchShare(sum(batch.rows), len(batch.rows))
    # A backward starts from the user's own loss over all outputs, which is assumed to be a mean over rows.
    if loss is None:
        return found._replace(kind=LossReduction.MEAN)
    if not has_loss:
        return found
    if not loss.given_targets:
        return find_own_batch_share(batch, found)
    count = loss.meaning.count
    if isinstance(count, Count):
        return _find_counted(count, loss, batch, found)
    if loss.meaning.steps_left and not ended:
        return found._replace(kind=LossReduction.OPEN)
    if isinstance(count, CountWatch):
        wholes = [[target] for target in loss.given_targets]
        return found._replace(kind=LossReduction.WATCHED, counted=_sum_up(count, wholes, batch.rows))
    return found._replace(kind=LossReduction.SUM if loss.meaning.reduction == "sum" else LossReduction.MEAN)


def _find_counted(count: Count, loss: BatchLoss, batch: Batch, found: BatchShare) -> BatchShare:
    """Return the share for a loss divided by a count of its target. The host may wait for an accelerator.

    found: the share with the rows and microbatches, to complete.
    """
    if count.additive:
        pieces = zip(loss.given_targets, batch.rows, strict=True)
        return found._replace(
            kind=LossReduction.COUNTED, counted=sum(count.find_divisor([target], n) for target, n in pieces)
        )
    cut = partial(split_target, loss.target, inputs=batch.program.inputs)
    return _add_up(count, lambda rows: ([[piece] for piece in cut(rows)], [loss.target]), batch, found)


def _add_up(count: Count, cut: Cutting, batch: Batch, found: BatchShare) -> BatchShare:
    """Return the share for a loss divided by a count.

    The counts of several pipelines can be added only if the counts of pieces of this batch can, which is tried here.
    cut: returns the inputs of the count for pieces of the batch. found: the share to complete.
    """
    rows = batch.rows if len(batch.rows) > 1 else [sum(batch.rows) - 1, 1]
    if not min(rows):
        return found._replace(kind=LossReduction.OTHER)
    pieces, whole = cut(rows)
    for kind in (LossReduction.COUNTED, LossReduction.COUNTED_ROWS) if count.by_rows else (LossReduction.COUNTED,):
        # A mean over rows divided by a mean over rows is a sum divided by a sum.
        find = count.find_divisor if kind == LossReduction.COUNTED else lambda piece, n: count.find_count(piece)
        counted = find(whole, sum(rows))
        parts = sum(find(piece, n) for piece, n in zip(pieces, rows, strict=True))
        if abs(parts - counted) <= 1e-9 * abs(counted):
            return found._replace(kind=kind, counted=counted)
    return found._replace(kind=LossReduction.OTHER)


def find_own_batch_share(batch: Batch, found: BatchShare) -> BatchShare:
    """Return the share for a loss that the model itself computes.

    found: the share with the rows and microbatches, to complete.
    """
    own = find_loss_meaning(batch.program)
    if own.kind == "unjoined":
        return found._replace(kind=LossReduction.COMPARED)
    if own.kind == "counted":
        return found._replace(kind=LossReduction.OTHER)
    if isinstance(own.count, CountWatch):
        whole = batch.cut_for_counts(batch.rows)[1]
        return found._replace(kind=LossReduction.WATCHED, counted=_sum_up(own.count, [whole], [found.rows]))
    if own.count is None:
        return found._replace(kind=LossReduction.SUM if own.kind == "sum" else LossReduction.MEAN)
    return _add_up(own.count, batch.cut_for_counts, batch, found)


def _sum_up(watch: CountWatch, pieces: Sequence[Sequence[Any]], rows: Sequence[int]) -> float:
    """Return a checksum of the counts per row: two pipelines get equal checksums if their counts per row are equal.

    The host may wait for an accelerator.
    """
    shares = [sum(count.find_divisor(one, n) for one, n in zip(pieces, rows, strict=True)) for count in watch.counts]
    # A count per row is a fraction, which is rounded differently for other numbers of rows: compare nine digits.
    return float(zlib.crc32(str([f"{share / sum(rows):.9g}" for share in shares]).encode()))


def weigh_batch_share(own: int, shares: Sequence[BatchShare]) -> float | None:
    """Return the weight of pipeline `own` in the loss of all pipelines (None: not known yet).

    Raises InputError if the loss of all pipelines does not follow from the losses of the single pipelines.
    """
    kind = max(share.kind for share in shares)
    if kind == LossReduction.OPEN:
        return None
    if kind == LossReduction.COMPARED:
        raise InputError(
            "the loss that the model returns is neither the mean nor the sum of its rows' losses, and each "
            "pipeline of a mesh has rows of its own: return a sum, or call pipe(x) and backward(), which weigh "
            "each pipeline by its rows"
        )
    if kind == LossReduction.WATCHED and len({share.counted for share in shares if share.kind == kind}) > 1:
        kind = LossReduction.OTHER
    if kind in (LossReduction.COUNTED, LossReduction.COUNTED_ROWS) and {p.kind for p in shares} - {
        kind,
        LossReduction.UNKNOWN,
    }:
        kind = LossReduction.OTHER
    if kind == LossReduction.OTHER:
        raise InputError(
            "the loss uses a count otherwise than as its only divisor, and each pipeline of a mesh has its own count: "
            "return the sum from loss_fn (loss_fn.reduction = 'sum'), and divide by the count of all pipelines"
        )
    if kind == LossReduction.SUM:
        return 1.0
    rows, counts = sum(p.rows for p in shares), sum(p.counted for p in shares)
    mine = shares[own]
    if kind in (LossReduction.MEAN, LossReduction.WATCHED):
        return mine.rows / rows
    # If no pipeline counts anything, the unsplit model divides by zero, and so does each pipeline.
    if not counts:
        return 1.0
    return mine.counted / counts * (mine.rows / rows if kind == LossReduction.COUNTED_ROWS else 1.0)
