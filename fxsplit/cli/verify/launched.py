"""Commands started by a launcher on several ranks: the devices, and each rank's part of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxsplit.errors import InputError
from fxsplit.ir.facts.capture.call import Call, Inputs
from fxsplit.runtime.microbatches import divide_rows, split_target
from fxsplit.runtime.ranks.world.join import join_default_group

SEED = 0
"""The random seed of all ranks, so that they build the same model."""


class Launched(NamedTuple):
    """The devices to compile for, in a form that `compile` accepts, and the pipeline that this rank belongs to.

    The pipeline is number `row` of `n_pipelines`, which divide the rows of a batch among them.
    """

    devices: Any
    row: int = 0
    n_pipelines: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank prints for all ranks."""
        return dist.get_rank() == 0

    def take_rows(self, model: nn.Module, call: Call, target: Any = None) -> tuple[Call, Any]:
        """Return the part of a call for the whole batch, and of its target, that this rank's pipeline computes."""
        if self.n_pipelines == 1:
            return call, target
        inputs, tensors = Inputs.of(model, *call, None)
        rows = divide_rows(inputs.count_rows(tensors), self.n_pipelines)
        start = sum(rows[: self.row])
        cuts = [spec.cut for spec in inputs.specs]
        own = inputs.make_call([c.narrow(t, start, rows[self.row]) for c, t in zip(cuts, tensors, strict=True)])
        return own, None if target is None else split_target(target, rows, inputs)[self.row]


@contextmanager
def join_ranks(n_pipelines: int) -> Iterator[Launched]:
    """Join the other ranks for the block, as `n_pipelines` data-parallel pipelines with the same random seed.

    Raises InputError unless n_pipelines divides the number of ranks.
    """
    started = not dist.is_initialized()
    device = join_default_group()
    try:
        n = dist.get_world_size()
        if not 1 <= n_pipelines <= n or n % n_pipelines:
            raise InputError(f"--pipelines {n_pipelines} of {n} ranks: give a number that divides them")
        # The factory runs on every rank. Without a common seed, compile would refuse the differing models.
        torch.manual_seed(SEED)
        if n_pipelines == 1:
            yield Launched("world")
        else:
            mesh = DeviceMesh(device.type, torch.arange(n).view(n_pipelines, -1), mesh_dim_names=("dp", "pp"))
            yield Launched(mesh, mesh.get_local_rank("dp"), n_pipelines)
    finally:
        # The caller's own process group is not destroyed.
        if started:
            dist.destroy_process_group()
