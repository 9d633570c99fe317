"""Gradient reduction: add the gradients of one pipeline over ranks, as the options of compile() say.

One reducer adds gradients over the pipelines of a mesh, and one over the replicas of each stage. This also gives access
to the compression errors that hooks keep, and to the count of bytes sent.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit.errors import InputError
from fxsplit.runtime.job.job import Job
from fxsplit.runtime.program import Program
from fxsplit.runtime.ranks.gradients.bytes_sent import BytesSent
from fxsplit.runtime.ranks.gradients.data_parallel import DataParallel, densify
from fxsplit.runtime.ranks.gradients.reducer import Reducer
from fxsplit.runtime.ranks.hooks.buckets import BUCKET_BYTES, GradientOffer
from fxsplit.runtime.ranks.hooks.hooks import HookChoice
from fxsplit.runtime.ranks.world.messages import begin_collective
from fxsplit.runtime.ranks.world.world import World
from fxsplit.schedule.schedule import Homes
from fxsplit.system.figures import show


class GradientReduction:
    """Adds gradients over ranks. `hook` and `bucket_bytes` are options of compile(); None means their defaults.

    Raises InputError for an unknown hook, or a bucket size that is not positive.
    """

    def __init__(self, world: World, hook: object = None, bucket_bytes: float | None = None) -> None:
        self.choice = HookChoice(hook)
        # Without a hook, the replicas of a stage send their gradients to the first replica, as in one process.
        self.is_stated = hook is not None
        check_bucket_bytes(bucket_bytes)
        self.traffic = BytesSent(self.choice.text)
        self._world = world
        self._bucket_bytes = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._replicas: dict[int, Reducer] = {}
        self._is_plain = False

    def __str__(self) -> str:
        return f"{self.choice.text} in buckets of {self._bucket_bytes:g} bytes"

    @property
    def adds(self) -> bool:
        """Whether gradients go through hooks: there are several pipelines, or a hook is stated."""
        return self.is_stated or self.data_parallel.n_pipelines > 1

    @property
    def kept_hook(self) -> str | None:
        """The name and options of the hook, if it keeps state from step to step, else None."""
        return self.choice.text if self.choice.keeps else None

    @cached_property
    def data_parallel(self) -> DataParallel:
        """The data-parallel pipelines of the mesh, or the only pipeline."""
        return DataParallel(self._world, self._make_reducer)

    def _make_reducer(self) -> Reducer:
        hook, is_plain = self.choice.make(), lambda: self._is_plain
        return Reducer(hook, bucket_bytes=self._bucket_bytes, traffic=self.traffic, is_plain=is_plain)

    def look_at(self, job: Job, weight: float, what: str) -> None:
        """Decide with all ranks, before any gradient is added, whether the hook gets this job's gradients.

        A hook with error feedback is bypassed if a gradient on any rank is not finite, for example after an overflow
        under a GradScaler: such a number would stay in the compression errors forever.
        weight: the weight of this rank's loss in the loss of the mesh. Gradients with weight 0 do not count. what: the
            user's call, for errors.
        """
        if self.choice.feeds_back and self.adds:
            # A gradient with weight zero may be NaN, and is left out.
            sums = (gradient for parts in job.sums for part in parts for gradient in part.totals.values())
            fine = not weight or all(map(is_finite, sums))
            told = self._world.whole.gather(torch.tensor([float(fine)]), what)
            self._is_plain = not all(map(float, told))

    def check_homes(self, homes: Homes) -> None:
        """Raise InputError if a stated hook has nothing to add, or if one user's state would serve two groups.

        homes: the devices of each stage.
        """
        groups = [home for home in homes if len(home) > 1]
        if self.data_parallel.n_pipelines > 1:
            groups.append(tuple(range(len(self._world))))
        self.choice.check_groups(max((sum(d in group for group in groups) for d in range(len(self._world))), default=0))
        if self.is_stated and not groups:
            raise InputError(
                f"gradient_hook={self.choice.text!r} adds gradients of data-parallel pipelines or of a stage's "
                "replicas, and here is one pipeline whose stages have one device each: give a mesh of two dimensions, "
                "mesh['dp', 'pp'], or leave it out"
            )

    def open_groups(self, program: Program) -> None:
        """Make the process groups of the stages' replicas. All ranks call it, and make the groups in the same order."""
        if self.is_stated:
            for members in sorted({tuple(sorted(home)) for home in program.homes if len(home) > 1}):
                self._world.open_replica_group(members)

    def add_replicas(self, job: Job, program: Program) -> None:
        """Add the gradients of each stage's replicas.

        The first replica gets the sums, and the other replicas keep none.
        """
        me, trained = self._world.me, program.list_trained()
        # All ranks take the stages in the same order: each rank waits for the other replicas of a stage.
        for stage, home in enumerate(program.homes):
            if len(home) == 1 or me not in home:
                continue
            number = home.index(me)
            sums, replica = job.sums[stage][number], program.replicas[stage][number]
            leaves = replica.list_leaves(trained[stage], 0)
            if sums.totals.keys() - set(leaves):
                raise InputError(
                    "the loss trains a parameter of its own, and its stage has replicas on several ranks: make it "
                    "a parameter of the model"
                )
            offers = [GradientOffer(leaf, densify(sums.totals.pop(leaf, None))) for leaf in reversed(leaves)]
            with self._world.waits_inside(f"the other replicas of stage {stage}, to add gradients"):
                found = self._find_reducer(stage, home).finish(offers)
            if number == 0:
                # Hooks return the mean.
                sums.totals.update({leaf: gradient * len(home) for leaf, gradient in found.items()})

    def copy_option(self) -> object:
        """Return the gradient hook in the form of compile(gradient_hook=), with a copy of its state, for a trial."""
        option = self.choice.option
        if not isinstance(option, tuple) or option[0] is None:
            return option
        # A user's state serves only one group.
        made = next(iter(self._replicas.values()), None)
        if self.data_parallel.n_pipelines > 1:
            made = self.data_parallel.reducer
        return (self.choice.make() if made is None else made.hook).copy_state(), option[1]

    def _find_reducer(self, stage: int, home: tuple[int, ...]) -> Reducer:
        """Return the reducer of a stage's replicas, bound to their present process group."""
        reducer = self._replicas.get(stage)
        if reducer is None:
            reducer = self._replicas[stage] = self._make_reducer()
        reducer.bind(self._world.open_replica_group(tuple(sorted(home))))
        return reducer

    def find_left_out(self, program: Program, weight: float) -> dict[Tensor, Tensor] | None:
        """Return, for each parameter of this rank, the part of its summed gradient that hooks keep for later steps.

        Returns None if no hook keeps anything. All ranks call it.
        weight: the weight of this pipeline's loss in the loss of all data-parallel pipelines.
        """
        world, data_parallel, trained = self._world, self.data_parallel, program.list_trained()
        found: dict[Tensor, Tensor] = {}
        reducers = [*self._replicas.values(), *([data_parallel.reducer] if data_parallel.n_pipelines > 1 else [])]
        if not any(reducer.left_out for reducer in reducers):
            return None
        for stage, reducer in self._replicas.items():
            home = program.homes[stage]
            leaves = program.replicas[stage][home.index(world.me)].list_leaves(trained[stage], 0)
            group = world.open_replica_group(tuple(sorted(home)))
            for own, leaf in zip(trained[stage], leaves, strict=True):
                left = _get_left_out(reducer, leaf).clone()
                self._add_over(group, left, f"the other replicas of stage {stage}")
                if home[0] == world.me:
                    found[own] = left
        if data_parallel.n_pipelines > 1:
            for own in (w for w, _ in program.list_placed() if w.requires_grad):
                # Hooks return the mean over all ranks.
                left = _get_left_out(data_parallel.reducer, own) / data_parallel.n_pipelines
                left = left + found[own] * weight if own in found else left
                self._add_over(world.dp_device_group, left, "the other pipelines")
                found[own] = left
        return found

    def _add_over(self, group: Any, tensor: Tensor, whom: str) -> None:
        """Add a tensor over the ranks of a group, in place. `whom` describes the other ranks, for an error."""
        add = partial(dist.all_reduce, group=group, async_op=True)
        self._world.wait(begin_collective([tensor], add, tensor), f"{whom}, to add what hooks have left out")

    def settle(self, *, kept: bool) -> None:
        """End a step.

        `kept`: whether its gradients were applied, so that the compression errors of the step become valid.
        """
        self.data_parallel.settle(kept=kept)
        for reducer in self._replicas.values():
            reducer.settle(kept=kept)


def _get_left_out(reducer: Reducer, parameter: Tensor) -> Tensor:
    """Return the compression error of a parameter's gradients (zeros if the hook keeps none)."""
    return torch.zeros_like(parameter) if reducer.left_out is None else reducer.left_out.get(parameter)


def is_finite(gradient: Tensor) -> bool:
    """Return whether all numbers of a dense or sparse gradient are finite. The host waits for them."""
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).isfinite().all())


def check_bucket_bytes(bucket_bytes: object) -> None:
    """Raise InputError if `bucket_bytes` is not a positive number or None."""
    fine = isinstance(bucket_bytes, (int, float)) and not isinstance(bucket_bytes, bool) and bucket_bytes > 0
    if bucket_bytes is not None and not fine:
        raise InputError(f"bucket_bytes={show(bucket_bytes)}: give a number of bytes above 0, such as 25e6")
