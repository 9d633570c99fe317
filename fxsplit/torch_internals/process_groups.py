"""Process groups of torch.distributed: what they do not say in public, and the words of their errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, _world

NO_TAG = 1 << 20
"""A tag that no message has."""
TIMED_OUT = ("timed out", "timeout")
"""What gloo and NCCL say where a wait takes longer than it may."""


LOST = ("gloo", "NCCL", "pair closure")
"""What is in the errors of a group that is broken."""


LOOK_S = 0.001
"""How often it is looked whether threads have let go of tensors."""
MOST_LENT = 64
"""No more tensors are kept: others than threads may hold one for long."""
_lent: list[Tensor] = []


_count_holders: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
"""Returns how many hold a tensor: Python for all its references, and each holder in C++."""


def lend(*tensors: Tensor) -> None:
    """Remember tensors that are given to a collective, for `wait_until_returned`, until others hold them no more.

    A thread of gloo's lets go of them a while after the collective is over. It takes Python's lock for that, and where
    Python is ending by then, the thread is ended in the middle, which ends the process by an abort.
    """
    _lent[:] = [*(t for t in _lent if _count_holders(t) > 1), *tensors][-MOST_LENT:]


def wait_until_returned(limit_s: float) -> bool:
    """Return whether nothing of torch's holds what was lent, as soon as that is so, or after a time."""
    until = time.monotonic() + limit_s
    while waits := any(_count_holders(tensor) > 1 for tensor in _lent):
        if time.monotonic() > until:
            break
        # Python's lock is free meanwhile.
        time.sleep(LOOK_S)
    return not waits


def read_timeout_s(group: Any, default_s: float) -> float:
    """Return how long the operations of a group may take, in seconds; the default where torch does not say."""
    for kind in ("cpu", "cuda"):
        # A group has a backend for each kind of device that it serves.
        with suppress(RuntimeError, AttributeError):
            return float(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
    return default_s


def find_host_backend(group: Any) -> Any:
    """Return what moves tensors of host memory in a group on gloo: it takes a call for less than the group does."""
    return group._get_backend(torch.device("cpu"))


def is_timeout(error: BaseException) -> bool:
    """Return whether a wait has failed because it took longer than it may."""
    return any(word in str(error).lower() for word in TIMED_OUT)


def is_lost(error: RuntimeError) -> bool:
    """Return whether an error says that a group is broken, or that a wait in it took too long.

    gloo raises a plain RuntimeError, and so does the callback of a future that failed.
    """
    return isinstance(error, dist.DistError) or any(word in str(error) for word in LOST)


def clone_store() -> Store:
    """Return the store through which the default process group met, with a connection of its own.

    What waits in one connection keeps all others waiting that use the same.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    cloned: Store = store.clone()
    return cloned


def count_groups() -> int:
    """Return how many groups this process has named so far, also those that it is not in."""
    return _world.group_count


def count_groups_from(number: int) -> None:
    """Let the next group have this number for its name, by which its ranks find each other: the same on all of them."""
    _world.group_count = number


def close_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let go of groups that nobody uses any more; of those that torch has let go of already there is nothing to do."""
    for group in groups:
        if group in _world.pg_map:
            dist.destroy_process_group(group)


def break_waits(group: dist.ProcessGroup) -> None:
    """Make fail what this process waits for in a group, and what others wait for from it; the group is of no use then.

    gloo's abort() does not wake who waits. A message that does not arrive in time ends the connection, which does.
    """
    if "gloo" not in group.name():
        group.abort()
        return
    for peer in range(group.size()):
        if peer != group.rank():
            # It fails, as it is to.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))
