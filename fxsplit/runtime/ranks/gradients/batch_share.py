"""Portions: what each of several pipelines has of a batch, and so what its loss and gradients weigh in those of all.

A mean over rows weighs a pipeline by its rows, a mean over labels by its labels, and a sum by one.
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
"""Returns what counts read of pieces of so many rows, and of all of them."""


class LossReduction(IntEnum):
    """How the losses of pipelines make that of all of them; of two kinds the larger one counts."""

    UNKNOWN = -1  # to ranks without the last stage
    MEAN = 0  # over rows
    SUM = 1
    COUNTED = 2  # a sum, divided by a count
    COUNTED_ROWS = 3  # a mean over rows, divided by a count
    WATCHED = 4  # it divides by counts, and does more than that: a mean where all count as many in each row
    OTHER = 5  # it divides by a count, in a way that is not known
    OPEN = 6  # the first microbatch of the first step will tell
    COMPARED = 7  # its rows depend on each other


class BatchShare(NamedTuple):
    """The share of one pipeline: its rows, in so many microbatches, and the number that its loss is divided by.

    counted: that number, if the loss counts. If the loss does more with counts than divide by them, a checksum, which
        is equal on pipelines that count as many entries in each row.
    """

    rows: int
    n_microbatches: int
    kind: int = LossReduction.UNKNOWN
    counted: float = 0.0

    def to_numbers(self) -> list[int]:
        """Return it as whole numbers of 64 bits, which ranks tell each other."""
        return [self.rows, self.n_microbatches, self.kind, *struct.unpack("q", struct.pack("d", self.counted))]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> BatchShare:
        """Return the portion of such numbers."""
        rows, n_microbatches, kind, bits = numbers
        return cls(rows, n_microbatches, kind, *struct.unpack("d", struct.pack("q", bits)))


def find_batch_share(request: JobRequest, *, has_loss: bool, ended: bool) -> BatchShare:
    """Return what this pipeline has of a call, as far as this rank knows.

    has_loss: whether the loss is computed on this rank. ended: whether all microbatches have been computed.
    """
    batch, loss = request.batch, request.loss
    found = BatchShare(sum(batch.rows), len(batch.rows))
    # A backward starts from a loss of the user's over all outputs, which is taken for a mean over rows.
    if loss is None:
        return found._replace(kind=LossReduction.MEAN)
    if not has_loss:
        return found
    if not loss.given_targets:
        return find_own_batch_share(batch, found)
    count = loss.meaning.count
    if isinstance(count, Count):
        return _find_counted(count, loss, batch, found)
    if loss.meaning.is_open and not ended:
        return found._replace(kind=LossReduction.OPEN)
    if isinstance(count, CountWatch):
        wholes = [[target] for target in loss.given_targets]
        return found._replace(kind=LossReduction.WATCHED, counted=_sum_up(count, wholes, batch.rows))
    return found._replace(kind=LossReduction.SUM if loss.meaning.reduction == "sum" else LossReduction.MEAN)


def _find_counted(count: Count, loss: BatchLoss, batch: Batch, found: BatchShare) -> BatchShare:
    """Return what there is of a loss that is divided by a count of its target; the host waits for an accelerator."""
    if count.additive:
        pieces = zip(loss.given_targets, batch.rows, strict=True)
        return found._replace(
            kind=LossReduction.COUNTED, counted=sum(count.find_divisor([target], n) for target, n in pieces)
        )
    cut = partial(split_target, loss.target, inputs=batch.program.inputs)
    return _add_up(count, lambda rows: ([[piece] for piece in cut(rows)], [loss.target]), batch, found)


def _add_up(count: Count, cut: Cutting, batch: Batch, found: BatchShare) -> BatchShare:
    """Return the portion of a count; that of all pipelines is the sum of theirs if it is so in parts of this one."""
    rows = batch.rows if len(batch.rows) > 1 else [sum(batch.rows) - 1, 1]
    if not min(rows):
        return found._replace(kind=LossReduction.OTHER)
    pieces, whole = cut(rows)
    for kind in (LossReduction.COUNTED, LossReduction.COUNTED_ROWS) if count.by_rows else (LossReduction.COUNTED,):
        # A mean over rows that is divided by a mean over rows is a sum that is divided by a sum.
        find = count.find_divisor if kind == LossReduction.COUNTED else lambda piece, n: count.find_count(piece)
        counted = find(whole, sum(rows))
        parts = sum(find(piece, n) for piece, n in zip(pieces, rows, strict=True))
        if abs(parts - counted) <= 1e-9 * abs(counted):
            return found._replace(kind=kind, counted=counted)
    return found._replace(kind=LossReduction.OTHER)


def find_own_batch_share(batch: Batch, found: BatchShare) -> BatchShare:
    """Return what there is of a loss that the model computes itself. `found` has the rows."""
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
    """Return a checksum of how many entries each of several counts has in a row; the host waits for an accelerator."""
    shares = [sum(count.find_divisor(one, n) for one, n in zip(pieces, rows, strict=True)) for count in watch.counts]
    # In a row of one count there may be a third of an entry, rounded another way for other rows.
    return float(zlib.crc32(str([f"{share / sum(rows):.9g}" for share in shares]).encode()))


def weigh_batch_share(own: int, shares: Sequence[BatchShare]) -> float | None:
    """Return what the loss of pipeline number `own` weighs in that of all; None where that is open still.

    Raises InputError for a loss of which the losses of pipelines do not make that of all.
    """
    kind = max(share.kind for share in shares)
    if kind == LossReduction.OPEN:
        return None
    if kind == LossReduction.COMPARED:
        raise InputError(
            "the loss that the model returns is neither a mean nor a sum of that of its rows, and each pipeline of a "
            "mesh has rows of its own: call pipe(x) and backward(), in which each pipeline weighs by its rows, or "
            "return a sum"
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
            "the loss is divided by a count, which pipelines of a mesh have each for themselves, and is more than the "
            "quotient: return the sum from loss_fn (loss_fn.reduction = 'sum'), and divide by the count of all of them"
        )
    if kind == LossReduction.SUM:
        return 1.0
    rows, counts = sum(p.rows for p in shares), sum(p.counted for p in shares)
    mine = shares[own]
    if kind in (LossReduction.MEAN, LossReduction.WATCHED):
        return mine.rows / rows
    # Nothing counts in any pipeline: the unsplit model divides by zero, and so does each of them.
    if not counts:
        return 1.0
    return mine.counted / counts * (mine.rows / rows if kind == LossReduction.COUNTED_ROWS else 1.0)
