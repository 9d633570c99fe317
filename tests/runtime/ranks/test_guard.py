"""Ranks whose programs end tell the others, and do not wait for those that end as well; all make groups together."""

from __future__ import annotations

import time

import pytest

from fxsplit.errors import RankError
from fxsplit.runtime.ranks.board import Board
from fxsplit.runtime.ranks.guard import Guard
from fxsplit.torch_internals.process_groups import clone_store
from tests.ranks import end_by_error, ranks


def leave_together(rank: int, n: int) -> list[bool]:
    """Return whether this rank has waited for the others to read its error, and had to do so to the end."""
    seen: list[bool] = []
    wait = Board.wait_until_seen

    def wait_long(self: Board, limit_s: float) -> bool:
        seen.append(wait(self, 30.0))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Board, "wait_until_seen", wait_long)
        Guard("test", rank, n, list, str).leave(KeyboardInterrupt())
    return seen


def test_ranks_that_are_all_interrupted_do_not_wait_for_each_other() -> None:
    """The first one waits, and sees that the others have read why it ends."""
    assert sorted(ranks(3, leave_together)) == [[], [], [True]]


def renew_one_after_another(rank: int, n: int) -> bool:
    """Return whether all ranks had made their groups when this one went on; each takes longer than the last."""
    guard = Guard("test", rank, n, list, str)
    with pytest.raises(ValueError, match="trouble"), guard.watch(30):
        raise ValueError("trouble")
    store = clone_store()

    def make() -> None:
        time.sleep(0.2 * rank)
        store.set(f"made/{rank}", "1")

    with guard.watch(30):
        guard.renew(make, 30)
        made = store.check([f"made/{other}" for other in range(n)])
    guard.rest()
    return made


def test_no_rank_goes_on_after_a_failure_before_all_have_made_their_groups() -> None:
    """It might fail at once, and leave others in the middle of making theirs, where nothing wakes them."""
    assert ranks(3, renew_one_after_another) == [True, True, True]


def renew_in_vain(rank: int, n: int) -> str:
    """Return what is raised where rank 1 cannot make its groups."""
    guard = Guard("test", rank, n, list, str)
    with pytest.raises(ValueError, match="trouble"), guard.watch(30):
        raise ValueError("trouble")

    def make() -> None:
        if rank == 1:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RankError) as caught, guard.watch(30):
        guard.renew(make, 30)
    guard.rest()
    return str(caught.value)


def test_all_ranks_raise_what_one_cannot_make() -> None:
    """Those that have made their own groups do not wait for it until a limit has passed."""
    first, second, third = ranks(3, renew_in_vain, limit_s=20)
    assert second == "the groups of ranks are not made anew: Connection closed by peer"
    assert first == third and second in first


def go_on_alone(rank: int, n: int, how: str) -> str:
    """Return what rank 0 is told that goes on after a failure, where the functions of the other ranks end."""
    guard = Guard("test", rank, n, list, str)
    with pytest.raises(ValueError, match="trouble"), guard.watch(30):
        raise ValueError("trouble")
    guard.rest()
    if rank != 0:
        if how == "raises":
            end_by_error(KeyError("lost"))
        return ""
    with pytest.raises(RankError) as caught, guard.watch(30):
        guard.renew(lambda: None, 30)
    guard.rest()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "told"),
    [("returns", "left: its program has ended, and it makes no more calls"), ("raises", "raised KeyError: 'lost'")],
)
def test_a_rank_that_goes_on_learns_that_functions_of_other_processes_have_ended(how: str, told: str) -> None:
    """A forked process does not run what is noted for a program's end, and the groups are broken since a failure."""
    assert ranks(2, go_on_alone, how, limit_s=20)[0] == f"rank 1 of 2 has {told}"
