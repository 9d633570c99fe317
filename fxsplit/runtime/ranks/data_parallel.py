"""Data parallel: pipelines side by side, each with batches of its own, that train one set of weights.

Ranks at the same place of all pipelines have the same stages: they are a *column*. Once a step they add the gradients
of their weights, bucket by bucket, each weighted by the share that its pipeline has of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError, RanksDiffer
from fxsplit.runtime.ranks.agreement import hash_text
from fxsplit.runtime.ranks.buckets import BUCKET_BYTES, Share
from fxsplit.runtime.ranks.hooks import Hook, read_hook, reduce_gradients
from fxsplit.runtime.ranks.world import World, begin
from fxsplit.torch_internals.grad_sums import Sums

MEAN, SUM, COUNTED = 0, 1, 2
"""How losses of pipelines make that of all of them: as a mean by rows, as a sum, or by a count that only each knows."""


class Columns:
    """The pipelines of a mesh, as a rank at one place of its own pipeline sees them.

    hook: what adds gradients, as `read_hook` takes it; its state is that of all steps.
    """

    def __init__(self, world: World, hook: object = None) -> None:
        self._world = world
        self._option = hook
        self._hook: Hook | None = None
        self._group: Any = None

    def weigh(self, call: str, rows: int, kind: int) -> float:
        """Return what this pipeline's gradients and loss weigh, once all pipelines have come to the same call.

        Raises RanksDiffer where one has come to another, InputError for a loss that only each pipeline can count.
        """
        told = self._gather(torch.tensor([hash_text(call), rows, kind]), call)
        odd = next((i for i, one in enumerate(told) if one[0] != told[0][0]), None)
        if odd is not None:
            raise RanksDiffer(
                f"pipeline {odd} of the mesh makes another call than pipeline 0: every rank makes the same calls in "
                "the same order, with batches of its own pipeline"
            )
        if any(one[2] == COUNTED for one in told):
            raise InputError(
                "the loss is divided by a count of labels, which pipelines of a mesh have each for themselves: return "
                "the sum from loss_fn (loss_fn.reduction = 'sum'), and divide by the count of all pipelines"
            )
        return 1.0 if kind == SUM else rows / sum(one[1] for one in told)

    def add(self, total: Tensor, weight: float) -> Tensor:
        """Return the sum of a number of all pipelines, each times its weight."""
        found = (total * weight).reshape(1)
        self._add(found, "the loss of all pipelines")
        return found.reshape(())

    def reduce(self, sums: Sums, leaves: Sequence[Tensor], weight: float) -> None:
        """Let the sums of these leaves be those of all pipelines, each times its weight.

        leaves: the same on all ranks of a column, in one order. One that got a gradient in any of them has one in all.
        """
        # The last layers first, whose gradients are there first. Most hooks take no sparse ones.
        totals = {leaf: sums.totals.get(leaf) for leaf in reversed(leaves)}
        shares = [Share(leaf, t.to_dense() if t is not None and t.is_sparse else t) for leaf, t in totals.items()]
        # Hooks make the mean of all ranks, and what is weighed adds up.
        hook = self._find_hook()
        found = reduce_gradients(
            shares, hook, self._group, weight=weight * len(self._world.rows), bucket_bytes=BUCKET_BYTES
        )
        # A copy for each: a bucket would stay in memory for as long as the gradient of any leaf in it.
        sums.totals.update({leaf: gradient.clone() for leaf, gradient in found.items()})

    def _find_hook(self) -> Hook:
        """Return the hook, made anew where the groups were."""
        if self._hook is None or self._group is not self._world.column_data:
            self._group = self._world.column_data
            self._hook = read_hook(self._option, self._group)
        return self._hook

    def _gather(self, numbers: Tensor, what: str) -> list[list[int]]:
        """Return whole numbers of all ranks of this column."""
        found = [torch.empty_like(numbers) for _ in self._world.rows]
        self._world.wait(begin(self._world.column.allgather, [found], [numbers]), f"the other pipelines at {what}")
        return [one.tolist() for one in found]

    def _add(self, tensor: Tensor, what: str) -> None:
        """Add a tensor of all ranks of this column in place."""
        work: Any = begin(self._world.column_data.allreduce, [tensor])
        self._world.wait(work, f"the other pipelines at {what}")
