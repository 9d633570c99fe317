"""Count-sketched gradients: gs-SGD (gradient sketching), with error feedback.

A *count sketch* adds each entry, with a random sign, to one cell in each of several rows of cells. The ranks' sketches
add up to the sketch of the sum, so they are summed over all ranks. The median of an entry's cells estimates the entry.
So every rank finds the same k largest entries, and their exact sums are exchanged and applied. Each rank keeps all
other entries for the next step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime.ranks.hooks.buckets import Bucket
from fxsplit.runtime.ranks.hooks.error_feedback import ErrorFeedback
from fxsplit.torch_internals.distributed.process_groups import lend

PRIME = 2**31 - 1
"""Entries are hashed modulo this prime, so that products fit into 64 bits."""
CHUNK = 2**20
"""How many entries are hashed at a time: all at once would take several times the gradients' memory."""


class Sketch:
    """The state of the hook.

    In each step, the largest entries of the gradients are applied: `share` of all, at least one.
    rows: the number of rows of a sketch; odd, so that the median is an estimate of one row.
    cells: the number of cells of a row for each applied entry.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, share: float = 0.01, rows: int = 5, cells: float = 4.0
    ) -> None:
        if not 0 < share <= 1:
            raise InputError(f"share={share!r}: give the share of the entries to apply, more than 0 and at most 1")
        if rows < 1 or rows % 2 == 0 or not cells > 0:
            raise InputError(f"rows={rows!r}, cells={cells!r}: give an odd number of rows, and cells above 0")
        self.group, self.share, self.rows, self.cells = group, share, rows, cells
        self.residuals = ErrorFeedback()
        self.sent_bytes = 0
        """The bytes that this rank has sent for the last bucket."""


def sketch_hook(state: Sketch, bucket: Bucket) -> torch.futures.Future[Tensor]:
    """Return the mean over ranks of the entries that the sketches estimate as largest, and zero for all other entries.

    `state` keeps this rank's gradient at the other entries, which is added to the gradient of the next step.
    """
    left = state.residuals.add_to(bucket)
    if left.numel() >= PRIME:
        raise InputError(f"a bucket of {left.numel()} entries: give smaller ones, bucket_bytes=25e6")
    k = min(left.numel(), max(1, int(left.numel() * state.share)))
    hashes = Hashes(state.rows, max(1, int(k * state.cells)), left.device)
    cells = hashes.sketch(left)
    dist.all_reduce(cells, group=state.group)
    # All ranks have the same cells, and so find the same entries.
    where = hashes.estimate(cells, left.numel()).abs().topk(k).indices
    values = left[where]
    left[where] = 0.0
    lend(cells, values)
    dist.all_reduce(values, group=state.group)
    state.sent_bytes = cells.nbytes + values.nbytes
    state.residuals.keep(bucket, left)
    found = torch.zeros_like(bucket.buffer())
    found[where] = values / dist.get_world_size(state.group)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(found)
    return done


class Hashes:
    """The cell and the sign of each entry, for each row of a sketch. They are the same on all ranks."""

    def __init__(self, rows: int, cells: int, device: torch.device) -> None:
        self._cells = cells
        # The user's generator stays untouched, so that its numbers do not change.
        generator = torch.Generator().manual_seed(20211213)
        numbers = torch.randint(1, PRIME, (4, rows, 1), generator=generator).to(device)
        self._place, self._sign = (numbers[0], numbers[1]), (numbers[2], numbers[3])
        self._shape = rows, cells

    def _hash(self, begin: int, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cells, int64 [rows, entries], and the signs of the entries from `begin` to `end`."""
        entries = torch.arange(begin, end, device=device)
        place = (self._place[0] * entries + self._place[1]) % PRIME % self._cells
        sign = ((self._sign[0] * entries + self._sign[1]) % PRIME % 2) * 2 - 1
        return place, sign

    def sketch(self, values: Tensor) -> Tensor:
        """Return the sketch of `values`, [rows, cells]."""
        found = values.new_zeros(self._shape)
        for begin in range(0, values.numel(), CHUNK):
            part = values[begin : begin + CHUNK]
            place, sign = self._hash(begin, begin + part.numel(), values.device)
            found.scatter_add_(1, place, part * sign)
        return found

    def estimate(self, cells: Tensor, count: int) -> Tensor:
        """Return an estimate of each of `count` entries from the cells."""
        found = cells.new_empty(count)
        for begin in range(0, count, CHUNK):
            end = min(begin + CHUNK, count)
            place, sign = self._hash(begin, end, cells.device)
            found[begin:end] = (cells.gather(1, place) * sign).median(0).values
        return found
