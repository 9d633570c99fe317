"""Data parallelism: several pipelines, each with its own batches, that train one set of weights.

                stage 0     stage 1
    pipeline 0  rank 0  -->  rank 1      row: a pipeline
                  |            |
    pipeline 1  rank 2  -->  rank 3      column: the same stage in all pipelines, adds gradients

Ranks at the same place of all pipelines have the same stages: they are a *column*. Once a step, the ranks of a column
add the gradients of their weights, bucket by bucket. Each gradient is weighted by its pipeline's share of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxsplit.errors import InputError, RanksDiffer
from fxsplit.runtime.ranks.gradients.batch_share import BatchShare, weigh_batch_share
from fxsplit.runtime.ranks.gradients.reducer import Reducer
from fxsplit.runtime.ranks.hooks.buckets import GradientOffer
from fxsplit.runtime.ranks.world.agreement import N_NUMBERS, hash_text
from fxsplit.runtime.ranks.world.messages import begin_collective, sort_by_rank
from fxsplit.runtime.ranks.world.world import World
from fxsplit.torch_internals.autograd.sums import Sums

OTHERS = "the other pipelines, to add gradients"


class DataParallel:
    """The pipelines of a mesh, as seen by one rank: it adds gradients with the ranks of its column.

    make: makes the object that adds the gradients.
    """

    def __init__(self, world: World, make: Callable[[], Reducer]) -> None:
        self._world = world
        self._make = make
        self._epoch: int | None = None

    @cached_property
    def reducer(self) -> Reducer:
        """The object that adds this column's gradients. Its hook keeps compression errors from step to step."""
        return self._make()

    @property
    def n_pipelines(self) -> int:
        """The number of pipelines."""
        return len(self._world.rows)

    @property
    def row(self) -> int:
        """The index of this rank's pipeline."""
        return self._world.rows.index(self._world.ranks)

    def weigh(self, call: str, share: BatchShare) -> tuple[float | None, bool]:
        """Wait for all pipelines to make the same call, and return the weight of this pipeline's loss and gradients.

        The weight is None if the kind of the loss is not known yet. The second value says whether all pipelines have
        the same number of microbatches.
        share: what this rank knows of its pipeline's share. Raises RanksDiffer if a pipeline makes another call.
        """
        whole, n = self._world.whole, len(self._world)
        own = [hash_text(call), *share.to_numbers()]
        # As long as an agreement's message, also with the call first, so that ranks in different calls can compare.
        numbers = torch.tensor(own + [0] * (N_NUMBERS - len(own)))
        told = [one.tolist() for one in whole.gather(numbers, f"the other pipelines at {call}")]
        pipelines = [told[i : i + n] for i in range(0, len(told), n)]
        odd = next((i for i, ranks in enumerate(pipelines) if ranks[0][0] != told[0][0]), None)
        if odd is not None:
            raise RanksDiffer(
                f"pipeline {odd} of the mesh makes another call than pipeline 0: every rank must make the same "
                "calls in the same order, with batches of its own pipeline, and train the same parameters. That "
                "includes save_checkpoint(), and the first call in a mode, which compiles"
            )
        # The ranks of a pipeline's last stage know most.
        known = [[BatchShare.read(one[1 : len(own)]) for one in ranks] for ranks in pipelines]
        shares = [max(each, key=lambda p: p.kind) for each in known]
        return weigh_batch_share(self.row, shares), len({p.n_microbatches for p in shares}) == 1

    def add(self, total: Tensor, weight: float) -> Tensor:
        """Return the weighted sum of one number over all pipelines."""
        # With weight zero the number may be NaN.
        found = (total * weight if weight else torch.zeros_like(total)).reshape(1)
        work: Any = begin_collective([found], self._world.dp_device_group.allreduce, [found])
        self._world.wait(work, "the other pipelines at the loss of all pipelines")
        return found.reshape(())

    @property
    def overlaps(self) -> bool:
        """Whether gradients may be added while stages run."""
        return self.reducer.hook.overlaps

    def begin(self, sums: Sums, leaves: Sequence[Tensor], weight: float) -> None:
        """Begin to add the gradients of these leaves over the column, and take them out of `sums`.

        leaves: weights whose gradients in this step are complete. All ranks of a column begin the same leaves in the
            same order.
        """
        # The last layers come first, as in a backward.
        offers = [GradientOffer(leaf, densify(sums.totals.pop(leaf, None))) for leaf in reversed(leaves)]
        with self._world.waits_inside(OTHERS):
            self._find_reducer().begin(offers, weight * self.n_pipelines)

    def reduce(self, sums: Sums, apart: Sequence[Sequence[Tensor]], leaves: Sequence[Tensor], weight: float) -> None:
        """Replace the sums of these leaves by the weighted sums over all pipelines.

        leaves: the same on all ranks of a column, in the same order. A leaf with a gradient in one pipeline gets a
            gradient in all.
        apart: the leaves, stage by stage, that `begin` may have begun early. The other leaves are added in the same
            buckets, so that sums do not depend on when they were begun.
        """
        extra = sums.totals.keys() - set(leaves)
        if extra:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in extra)
            raise InputError(
                f"the loss trains a parameter of its own (of shape {shapes}), which the pipelines of a mesh do not "
                "share: make it a parameter of the model"
            )
        reducer = self._find_reducer()
        for own in reversed(apart) if self.overlaps else ():
            if own and not reducer.has_begun(own[0]):
                self.begin(sums, own, weight)
        offers = [GradientOffer(leaf, densify(sums.totals.get(leaf))) for leaf in reversed(leaves)]
        with self._world.waits_inside(OTHERS):
            # Hooks return the mean over all ranks, and weighted gradients add up.
            found = reducer.finish(offers, weight * self.n_pipelines)
        # Copy each gradient: as a view it would keep the whole bucket in memory.
        sums.totals.update({leaf: gradient.clone() for leaf, gradient in found.items()})

    def settle(self, *, kept: bool) -> None:
        """End a step. `kept`: whether its gradients were applied.

        Otherwise hooks forget the step's compression errors.
        """
        if self.n_pipelines > 1:
            self.reducer.settle(kept=kept)

    def gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Return a host tensor from every rank of this column, in the order of the pipelines.

        The tensors have the same shape and dtype on all ranks.
        """
        found = [torch.empty_like(tensor) for _ in self._world.rows]
        by_rank = sort_by_rank(found, [row[self._world.me] for row in self._world.rows])
        work: Any = begin_collective([tensor, *found], self._world.dp_group.allgather, [by_rank], [tensor])
        self._world.wait(work, f"the other pipelines at {what}")
        return found

    def _find_reducer(self) -> Reducer:
        """Return the reducer, bound to the present process group: a failure replaces the groups."""
        if self._epoch != self._world.epoch:
            self._epoch = self._world.epoch
            self.reducer.bind(self._world.dp_device_group)
        return self.reducer


def densify(gradient: Tensor | None) -> Tensor | None:
    """Return a dense gradient: most hooks do not take sparse gradients."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
