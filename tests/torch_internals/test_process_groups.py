"""What process groups of torch do behind its back."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fxsplit.torch_internals import process_groups
from fxsplit.torch_internals.process_groups import lend, wait_until_returned
from tests.ranks import ranks


def hold(tensor: Tensor) -> Tensor:
    """Return what holds a tensor in C++, as a thread of gloo's does: a graph that has saved it."""
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
    """Others than threads may hold a tensor: that must not become a list without an end."""
    holders = [hold(one) for one in torch.ones(process_groups.MOST_LENT + 9, 3).unbind()]
    for holder in holders:
        lend(holder.grad_fn._saved_other)  # type: ignore[union-attr]
    assert len(process_groups._lent) == process_groups.MOST_LENT


def gather(rank: int, n: int) -> bool:
    """Return whether what a world gathers is kept after the collective."""
    from fxsplit.runtime.ranks.join import join_world

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
