"""Process groups of torch.distributed: what they do not say in public, and the words of their errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store, _set_pg_timeout, _world

from fxsplit.torch_internals.scopes.undo import restore_after

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


# How a group is made


class WatchedStore(Store):
    """A store through which ranks meet: whoever waits in it looks again and again whether that is in vain.

    torch's own stores wait in C++: neither Ctrl-C nor a failure of another rank wakes them.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.look: Callable[[], object] = bool

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once there is one."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to the value of a key."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have values; raises what `look` raises, and DistStoreError after a time."""
        limit_s = math.inf if timeout is None else timeout.total_seconds()
        begin = time.monotonic()
        while not self._store.check(keys):
            self.look()
            if time.monotonic() > begin + limit_s:
                raise dist.DistStoreError(f"Timed out after {limit_s:g} s waiting for {', '.join(keys)}")
            time.sleep(LOOK_S)


_watched: WeakKeyDictionary[Store, WatchedStore] = WeakKeyDictionary()
"""The watched store of each default group's; C++ calls it by a pointer, so it is kept as long as that one is."""


def make_group(
    ranks: Iterable[int],
    limit_s: float,
    backend: str = "gloo",
    look: Callable[[], object] = bool,
    make_limit_s: float | None = None,
) -> Any:
    """Return a group of some ranks, as torch's new_group() does; each rank calls it.

    limit_s: how long a wait in the group may take. look: is called while this rank waits for the others to come, and
        raises if that is in vain. make_limit_s: how long this may take (default: `limit_s`).
    """
    made_in = timedelta(seconds=limit_s if make_limit_s is None else make_limit_s)
    default: Any = dist.group.WORLD
    kind, store = _world.pg_map[default]
    # Threads of NCCL's look into its store later on, and have no time for Python.
    if backend != "gloo":
        return dist.new_group(list(ranks), timedelta(seconds=limit_s), backend=backend)
    watched = _watched.setdefault(store, WatchedStore(store))
    with (
        restore_after(partial(setattr, watched, "look", bool)),
        restore_after(partial(_world.pg_map.__setitem__, default, (kind, store))),
    ):
        watched.look = look
        _world.pg_map[default] = kind, watched
        made = dist.new_group(list(ranks), made_in, backend=backend)
    if made is not dist.GroupMember.NON_GROUP_MEMBER:
        _set_pg_timeout(timedelta(seconds=limit_s), made)
    return made


def has_closed(group: Any, peer: int) -> bool:
    """Return whether the connection to a rank of a group on gloo is closed, as it is after that rank's process is gone.

    False for other groups, which do not say. A message is asked for that never comes, and not waited for.
    """
    backend = _find_gloo(group)
    try:
        if backend is not None:
            backend.recv([_nothing], peer, NO_TAG)
    except RuntimeError:
        return True
    return False


_nothing = torch.empty(1)


def _find_gloo(group: Any) -> Any:
    """Return the part of a group that is on gloo, or None where there is none."""
    with suppress(RuntimeError):
        backend = find_host_backend(group)
        return backend if isinstance(backend, dist.ProcessGroupGloo) else None
    return None


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
