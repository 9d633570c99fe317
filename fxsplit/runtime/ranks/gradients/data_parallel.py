"""Data parallel: pipelines side by side, each with batches of its own, that train one set of weights.

Ranks at the same place of all pipelines have the same stages: they are a *column*. Once a step they add the gradients
of their weights, bucket by bucket, each weighted by what its pipeline has of the whole batch.
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
    """The pipelines of a mesh, as a rank at one place of its own pipeline sees them.

    make: makes what adds gradients.
    """

    def __init__(self, world: World, make: Callable[[], Reducer]) -> None:
        self._world = world
        self._make = make
        self._epoch: int | None = None

    @cached_property
    def reducer(self) -> Reducer:
        """What adds gradients of this column; its hook keeps what it has left out from step to step."""
        return self._make()

    @property
    def n_pipelines(self) -> int:
        """How many pipelines there are."""
        return len(self._world.rows)

    @property
    def row(self) -> int:
        """The number of this rank's pipeline."""
        return self._world.rows.index(self._world.ranks)

    def weigh(self, call: str, share: BatchShare) -> tuple[float | None, bool]:
        """Return what this pipeline's gradients and loss weigh, once all pipelines have come to the same call.

        The weight is None where the kind of the loss is open still. Beside it: whether all pipelines run one schedule.
        portion: what this rank knows of its pipeline. Raises RanksDiffer where a pipeline has come to another call.
        """
        whole, n = self._world.whole, len(self._world)
        own = [hash_text(call), *share.to_numbers()]
        # As long as what the others tell who have come to another call, and first the call there too.
        numbers = torch.tensor(own + [0] * (N_NUMBERS - len(own)))
        told = [one.tolist() for one in whole.gather(numbers, f"the other pipelines at {call}")]
        pipelines = [told[i : i + n] for i in range(0, len(told), n)]
        odd = next((i for i, ranks in enumerate(pipelines) if ranks[0][0] != told[0][0]), None)
        if odd is not None:
            raise RanksDiffer(
                f"pipeline {odd} of the mesh makes another call than pipeline 0: every rank makes the same calls in "
                "the same order, with batches of its own pipeline, and trains the same parameters. So it is with "
                "save_checkpoint(), and with the first call in a mode, which compiles"
            )
        # Of a pipeline its last stage knows most.
        known = [[BatchShare.read(one[1 : len(own)]) for one in ranks] for ranks in pipelines]
        shares = [max(each, key=lambda p: p.kind) for each in known]
        return weigh_batch_share(self.row, shares), len({p.n_microbatches for p in shares}) == 1

    def add(self, total: Tensor, weight: float) -> Tensor:
        """Return the sum of a number of all pipelines, each times its weight."""
        # What weighs nothing may be no number.
        found = (total * weight if weight else torch.zeros_like(total)).reshape(1)
        work: Any = begin_collective([found], self._world.dp_device_group.allreduce, [found])
        self._world.wait(work, "the other pipelines at the loss of all pipelines")
        return found.reshape(())

    @property
    def overlaps(self) -> bool:
        """Whether gradients may be added while stages run."""
        return self.reducer.hook.overlaps

    def begin(self, sums: Sums, leaves: Sequence[Tensor], weight: float) -> None:
        """Begin to add the gradients of these leaves, and take them out of the sums: nothing more comes to them.

        leaves: the same on all ranks of a column, which begin the same ones in the same order.
        """
        # The last layers first, as they are in a step.
        offers = [GradientOffer(leaf, densify(sums.totals.pop(leaf, None))) for leaf in reversed(leaves)]
        with self._world.waits_inside(OTHERS):
            self._find_reducer().begin(offers, weight * self.n_pipelines)

    def reduce(self, sums: Sums, apart: Sequence[Sequence[Tensor]], leaves: Sequence[Tensor], weight: float) -> None:
        """Let the sums of these leaves be those of all pipelines, each times its weight.

        leaves: the same on all ranks of a column, in one order. One that got a gradient in any of them has one in all.
        apart: those of them that `begin` may have begun, stage by stage; what it has not is added in the same buckets,
            so that the sums do not depend on when they were begun.
        """
        extra = sums.totals.keys() - set(leaves)
        if extra:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in extra)
            raise InputError(
                f"a loss trains a parameter of its own (of shape {shapes}), which is of no pipeline of the mesh: make "
                "the parameter one of the model"
            )
        reducer = self._find_reducer()
        for own in reversed(apart) if self.overlaps else ():
            if own and not reducer.has_begun(own[0]):
                self.begin(sums, own, weight)
        offers = [GradientOffer(leaf, densify(sums.totals.get(leaf))) for leaf in reversed(leaves)]
        with self._world.waits_inside(OTHERS):
            # Hooks make the mean of all ranks, and what is weighed adds up.
            found = reducer.finish(offers, weight * self.n_pipelines)
        # A copy for each: a bucket would stay in memory for as long as the gradient of any leaf in it.
        sums.totals.update({leaf: gradient.clone() for leaf, gradient in found.items()})

    def settle(self, *, kept: bool) -> None:
        """End a step. `kept`: whether its gradients were applied."""
        if self.n_pipelines > 1:
            self.reducer.settle(kept=kept)

    def gather(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Return a tensor of host memory from every rank of this column, in the order of pipelines, all of one kind."""
        found = [torch.empty_like(tensor) for _ in self._world.rows]
        by_rank = sort_by_rank(found, [row[self._world.me] for row in self._world.rows])
        work: Any = begin_collective([tensor, *found], self._world.dp_group.allgather, [by_rank], [tensor])
        self._world.wait(work, f"the other pipelines at {what}")
        return found

    def _find_reducer(self) -> Reducer:
        """Return what adds gradients, over the groups that there are since the last failure."""
        if self._epoch != self._world.epoch:
            self._epoch = self._world.epoch
            self.reducer.bind(self._world.dp_device_group)
        return self.reducer


def densify(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient as hooks take it; most of them take no sparse ones."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
