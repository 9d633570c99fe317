"""Process groups of torch.distributed: their private parts, waits that can be ended, and their errors."""

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
"""A tag that no message uses."""
TIMED_OUT = ("timed out", "timeout")
"""Words in gloo's and NCCL's errors if an operation times out."""


LOST = ("gloo", "NCCL", "pair closure")
"""Words in the errors of a broken group."""


LOOK_S = 0.001
"""The polling interval, in seconds."""
MOST_LENT = 64
"""How many tensors are remembered at most, since the user's code may hold a tensor for long."""
_lent: list[Tensor] = []


_count_holders: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
"""Returns the number of holders of a tensor: all Python references count as one, and each C++ holder as one."""


def lend(*tensors: Tensor) -> None:
    """Remember tensors that are passed to a collective, for `wait_until_returned`, until nothing else holds them.

    A gloo thread drops its tensors some time after the collective has ended, and needs Python's lock to do so. If
    Python is exiting by then, the thread is killed while it waits for the lock, and the process aborts.
    """
    _lent[:] = [*(t for t in _lent if _count_holders(t) > 1), *tensors][-MOST_LENT:]


def wait_until_returned(limit_s: float) -> bool:
    """Wait until torch holds no tensor that `lend` remembers, for at most `limit_s` seconds.

    Returns whether it succeeded.
    """
    until = time.monotonic() + limit_s
    while waits := any(_count_holders(tensor) > 1 for tensor in _lent):
        if time.monotonic() > until:
            break
        # Sleeping releases Python's lock.
        time.sleep(LOOK_S)
    return not waits


def read_timeout_s(group: Any, default_s: float) -> float:
    """Return the timeout of a group's operations, in seconds, or the default if torch does not know it."""
    for kind in ("cpu", "cuda"):
        # A group has one backend per device type.
        with suppress(RuntimeError, AttributeError):
            return float(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
    return default_s


def find_host_backend(group: Any) -> Any:
    """Return a group's backend for host memory. Calling it directly has less overhead than calling the group."""
    return group._get_backend(torch.device("cpu"))


def is_timeout(error: BaseException) -> bool:
    """Return whether an error says that an operation timed out."""
    return any(word in str(error).lower() for word in TIMED_OUT)


def is_lost(error: RuntimeError) -> bool:
    """Return whether an error says that a group is broken or an operation in it timed out.

    gloo and the callback of a failed future raise a plain RuntimeError.
    """
    return isinstance(error, dist.DistError) or any(word in str(error) for word in LOST)


def clone_store() -> Store:
    """Return another connection to the default process group's store.

    A wait in one connection blocks all other users of that connection.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    cloned: Store = store.clone()
    return cloned


# Making groups


class WatchedStore(Store):
    """A store for the rendezvous of ranks. While it waits, it calls `look` repeatedly, which may raise an error.

    torch's own stores wait in C++: neither Ctrl-C nor a failure of another rank ends such a wait.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.look: Callable[[], object] = bool

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return it."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to the value of a key."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values, and call `look` meanwhile. An error of `look` ends the wait.

        Raises DistStoreError after the timeout.
        """
        limit_s = math.inf if timeout is None else timeout.total_seconds()
        begin = time.monotonic()
        while not self._store.check(keys):
            self.look()
            if time.monotonic() > begin + limit_s:
                raise dist.DistStoreError(f"Timed out after {limit_s:g} s waiting for {', '.join(keys)}")
            time.sleep(LOOK_S)


_watched: WeakKeyDictionary[Store, WatchedStore] = WeakKeyDictionary()
"""The watched store of each default group's store. C++ holds a bare pointer to it, so it must live as long."""


def make_group(
    ranks: Iterable[int],
    limit_s: float,
    backend: str = "gloo",
    look: Callable[[], object] = bool,
    make_limit_s: float | None = None,
) -> Any:
    """Make a group of some ranks, as torch's new_group() does. Every rank calls it.

    limit_s: the timeout of operations in the group, in seconds.
    look: called repeatedly while this rank waits for the others; it raises an error to end the wait.
    make_limit_s: the timeout of making the group, in seconds (default: `limit_s`).
    """
    made_in = timedelta(seconds=limit_s if make_limit_s is None else make_limit_s)
    default: Any = dist.group.WORLD
    kind, store = _world.pg_map[default]
    # NCCL's threads use their store later on, and cannot call Python.
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
    """Return whether the connection to a rank of a gloo group is closed, as it is after that rank's process has died.

    Returns False for other backends, which cannot report it. To find out, this posts a receive for a message that never
    comes, without waiting for it.
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
    """Return a group's gloo backend, or None."""
    with suppress(RuntimeError):
        backend = find_host_backend(group)
        return backend if isinstance(backend, dist.ProcessGroupGloo) else None
    return None


def count_groups() -> int:
    """Return how many groups this process has named so far, including groups without this process."""
    return _world.group_count


def count_groups_from(number: int) -> None:
    """Set the number from which torch makes the next group's name.

    Ranks meet by that name, so it must be equal on all.
    """
    _world.group_count = number


def close_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy groups that are no longer used. Groups that torch has already destroyed are skipped."""
    for group in groups:
        if group in _world.pg_map:
            dist.destroy_process_group(group)


def break_waits(group: dist.ProcessGroup) -> None:
    """Make pending operations in a group fail, on this rank and on the others. The group is unusable afterwards.

    gloo's abort() does not end waits of threads. But a receive that times out closes the connection, which ends them.
    """
    if "gloo" not in group.name():
        group.abort()
        return
    for peer in range(group.size()):
        if peer != group.rank():
            # Fails on purpose.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))
