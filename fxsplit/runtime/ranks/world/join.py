"""Join the ranks of a pipeline: all ranks that the launcher has started, or one row of a mesh of devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fxsplit.errors import InputError
from fxsplit.runtime.ranks.failures.membership import LIMIT_S
from fxsplit.runtime.ranks.world.world import World

_worlds: dict[Any, World] = {}


def is_launched() -> bool:
    """Return whether a launcher such as torchrun has started this process as one of several."""
    return dist.is_available() and (dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys())


def find_own_device() -> torch.device:
    """Return the device of this rank: the GPU of its local rank, or the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise InputError(
            f"LOCAL_RANK={local}, and this machine has {count} GPUs: start as many ranks as there are GPUs "
            f"(torchrun --nproc-per-node={count}), or hide them (CUDA_VISIBLE_DEVICES=) to run on CPUs"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _start(backend: str) -> None:
    """Make the default process group of the ranks that a launcher has started."""
    limit = timedelta(seconds=LIMIT_S)
    store, rank, n_ranks = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    # torchrun keeps one store for all restarts: without a name of its own, a restarted rank would read an earlier
    # start's entries, and wait forever.
    start = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{n_ranks}"
    named = PrefixStore(start, store)
    dist.init_process_group(backend, store=named, rank=rank, world_size=n_ranks, timeout=limit)


def join_default_group() -> torch.device:
    """Make the default process group if there is none, and return this rank's device."""
    device = find_own_device()
    if not dist.is_initialized():
        _start("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def join_world(rows: Sequence[Sequence[int]] | None = None) -> World:
    """Return the world of this rank's pipeline: all ranks of the default group, or the ranks of its row.

    rows: the ranks of each pipeline of a mesh (None: one pipeline of all ranks).
    Makes the default process group if there is none. Pipelines of the same ranks share a world. Raises InputError for a
    rank that is in no row.
    """
    device = join_default_group()
    rows = [tuple(row) for row in rows or [range(dist.get_world_size())]]
    n_ranks = sum(map(len, rows))
    if n_ranks != dist.get_world_size():
        raise InputError(
            f"the mesh has {n_ranks} of {dist.get_world_size()} ranks, but all ranks must make the groups of a "
            "pipeline: give a mesh of all ranks, such as mesh['dp', 'pp'], in which each row is a pipeline"
        )
    own = next((row for row in rows if dist.get_rank() in row), None)
    if own is None:
        raise InputError(f"rank {dist.get_rank()} is in no pipeline of the mesh {rows}: every rank has a place in it")
    # By the group itself, which is a new object after destroy_process_group().
    key = dist.group.WORLD, own, tuple(rows)
    if key not in _worlds:
        for known in [known for known in _worlds if known[0] is not dist.group.WORLD]:
            del _worlds[known]
        whole = World([rank for row in rows for rank in row], device) if len(rows) > 1 else None
        _worlds[key] = World(own, device, rows, whole)
    return _worlds[key]
