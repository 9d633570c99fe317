"""Top-k gradients with a global selection: gTop-k (Shi et al. 2019), with error feedback.

    rank 0 --.
    rank 1 --+-- merge: keep k --.
    rank 2 --.                   +-- merge: keep k -- rank 0 -- broadcast to all
    rank 3 --+-- merge: keep k --'

Each rank offers the k largest entries of its gradients plus earlier errors. Pairs of ranks add their offers and keep
the k largest sums, along a tree, until one rank has k entries for all. All ranks apply these. A rank that drops an
entry keeps it for the next step, even if another rank had offered it. So nothing is lost. The paper's rule checks only
whether an entry was selected in the end, and loses entries that were dropped on the way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime.ranks.hooks.buckets import Bucket
from fxsplit.runtime.ranks.hooks.error_feedback import ErrorFeedback
from fxsplit.torch_internals.distributed.process_groups import lend


class TopK:
    """The state of the hook.

    In each step, `share` of the entries of each bucket are applied, and at least one entry.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise InputError(f"share={share!r}: give the share of the entries to apply, more than 0 and at most 1")
        self.group, self.share = group, share
        self.residuals = ErrorFeedback()
        self.sent_bytes = 0
        """The bytes that this rank has sent for the last bucket."""


def top_k_hook(state: TopK, bucket: Bucket) -> torch.futures.Future[Tensor]:
    """Return the mean over ranks of the largest entries. Other entries are zero, and kept for the next step."""
    rank, n = dist.get_rank(state.group), dist.get_world_size(state.group)
    left = state.residuals.add_to(bucket)
    k = min(left.numel(), max(1, int(left.numel() * state.share)))
    # 32-bit indices suffice for a bucket, and indices are half of the message.
    where = left.abs().topk(k).indices.int()
    values = left[where]
    left[where] = 0.0
    step, sent = 1, list[Tensor]()
    while step < n:
        if rank % (2 * step):
            _send(where, values, rank - step, state.group)
            sent += [where, values]
            break
        if rank + step < n:
            others = _receive(where, values, rank + step, state.group)
            where, values, dropped = merge((where, values), others, k)
            left.index_add_(0, *dropped)
        step *= 2
    # Rank 0 has the selection, and the broadcast overwrites the entries of other ranks.
    for tensor in (where, values):
        lend(tensor)
        dist.broadcast(tensor, group=state.group, group_src=0)
    state.sent_bytes = sum(t.nbytes for t in (*sent, *([where, values] if rank == 0 else [])))
    state.residuals.keep(bucket, left)
    found = torch.zeros_like(bucket.buffer())
    found[where] = values / n
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(found)
    return done


Entries = tuple[Tensor, Tensor]
"""Indices, int32, and the values there."""


def merge(mine: Entries, others: Entries, k: int) -> tuple[Tensor, Tensor, Entries]:
    """Return the k largest entries of the sum of two sets, as indices and values, and the dropped entries."""
    places, at = torch.cat([mine[0], others[0]]).unique(return_inverse=True)
    sums = torch.zeros_like(places, dtype=mine[1].dtype).index_add_(0, at, torch.cat([mine[1], others[1]]))
    kept = sums.abs().topk(k).indices
    rest = torch.ones_like(places, dtype=torch.bool)
    rest[kept] = False
    return places[kept], sums[kept], (places[rest], sums[rest])


def _send(where: Tensor, values: Tensor, to: int, group: dist.ProcessGroup | None) -> None:
    for tensor in (where, values):
        dist.send(tensor, group=group, group_dst=to)


def _receive(where: Tensor, values: Tensor, source: int, group: dist.ProcessGroup | None) -> Entries:
    found = torch.empty_like(where), torch.empty_like(values)
    for tensor in found:
        dist.recv(tensor, group=group, group_src=source)
    return found
