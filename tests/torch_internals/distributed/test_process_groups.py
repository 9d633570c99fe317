"""Private behaviour of torch's process groups."""

from __future__ import annotations

import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit.torch_internals.distributed import process_groups
from fxsplit.torch_internals.distributed.process_groups import (
    WatchedStore,
    clone_store,
    count_groups,
    count_groups_from,
    has_closed,
    lend,
    make_group,
    read_timeout_s,
    wait_until_returned,
)
from tests.support.ranks import ranks


def hold(tensor: Tensor) -> Tensor:
    """Return an autograd graph that saves a tensor, and so holds it in C++, like a gloo thread."""
    return torch.ones(3, requires_grad=True) * tensor


def test_a_tensor_is_remembered_for_as_long_as_a_thread_may_hold_it() -> None:
    process_groups._lent.clear()
    first, second = torch.ones(3), torch.ones(3)
    holder = hold(first)
    seen = [weakref.ref(first), weakref.ref(second)]
    lend(first, second)
    del first, second
    lend(torch.ones(1))
    assert seen[0]() is not None and seen[1]() is None, "nothing but the list has had the second"
    assert not wait_until_returned(0.01)
    del holder
    assert wait_until_returned(0.01)
    lend(torch.ones(1))
    assert seen[0]() is None


def test_no_more_are_kept_than_a_number() -> None:
    """Something other than a gloo thread may hold a tensor for long, so the list must stay bounded."""
    holders = [hold(one) for one in torch.ones(process_groups.MOST_LENT + 9, 3).unbind()]
    for holder in holders:
        lend(holder.grad_fn._saved_other)  # type: ignore[union-attr]
    assert len(process_groups._lent) == process_groups.MOST_LENT


def make_in_vain(rank: int, n: int) -> tuple[str, str, float, bool]:
    """Try to make a group without the other rank. Returns the error, and the group made next."""
    store, looks = clone_store(), list[int]()

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise KeyError("in vain")

    raised = ["", ""]
    if rank == 0:
        with pytest.raises(KeyError) as caught:
            make_group([0, 1], 600.0, look=look)
        with pytest.raises(dist.DistError) as late:
            make_group([0, 1], 600.0, make_limit_s=0.1)
        raised = [str(caught.value), str(late.value)]
    store.set(f"done/{rank}", str(count_groups()))
    store.wait(["done/0"])
    count_groups_from(int(store.get("done/0")))
    group = make_group([0, 1], 123.0)
    dist.all_reduce(torch.ones(1), group=group)
    kept = isinstance(dist.distributed_c10d._get_default_store(), WatchedStore)
    return raised[0], raised[1], read_timeout_s(group, 0.0), kept


def test_who_makes_a_group_looks_whether_that_is_in_vain() -> None:
    first, second = ranks(2, make_in_vain, limit_s=30)
    assert first[0] == "'in vain'" and "Timed out after 0.1 s" in first[1]
    assert first[2:] == second[2:] == (123.0, False), "the group has its own limit, and the store is torch's again"


def ask_for_closed(rank: int, n: int) -> list[bool]:
    """Return whether the connection to the other rank was closed before and after that one was killed."""
    group = make_group([0, 1], 600.0)
    store = clone_store()
    if rank == 1:
        store.wait(["asked"])
        os._exit(3)
    found, until = [has_closed(group, 1)], time.monotonic() + 60
    store.set("asked", "1")
    while not (closed := has_closed(group, 1)) and time.monotonic() < until:
        time.sleep(0.01)
    return [*found, closed]


def test_the_connection_to_a_process_that_is_gone_is_closed() -> None:
    assert ranks(2, ask_for_closed, dying=[1]) == [[False, True], 3]


def gather(rank: int, n: int) -> bool:
    """Return whether the tensors of a world's gather are remembered after the collective."""
    from fxsplit.runtime.ranks.world.join import join_world

    world = join_world()
    own = torch.tensor([rank])
    with world.watch():
        found = world.gather(own, "the test")
        kept = all(any(t is one for one in process_groups._lent) for t in (own, *found))
        world.broadcast(own, 1, "the test")
    world._guard.rest()
    return kept and any(own is one for one in process_groups._lent) and int(own) == 1


def test_collectives_lend_their_tensors() -> None:
    assert ranks(2, gather) == [True, True]
