"""Ranks that end say so, and do not wait for other ending ranks; groups are made by all ranks together."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest

from fxsplit.errors import RankError
from fxsplit.runtime.ranks.failures.board import FaultBoard, look_until
from fxsplit.runtime.ranks.failures.guard import FaultGuard, _end_started
from fxsplit.torch_internals.distributed.process_groups import clone_store
from tests.support.ranks import end_by_error, ranks


def leave_together(rank: int, n: int) -> list[bool]:
    """Return [True] if this rank waited until all ranks had read its error, and [] if it did not wait."""
    seen: list[bool] = []
    wait = FaultBoard.wait_until_seen

    def wait_long(self: FaultBoard, limit_s: float) -> bool:
        seen.append(wait(self, 30.0))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultBoard, "wait_until_seen", wait_long)
        FaultGuard("test", rank, n, list, str).leave(KeyboardInterrupt())
    return seen


def test_ranks_that_are_all_interrupted_do_not_wait_for_each_other() -> None:
    """The first rank waits until both other ranks have read its error."""
    assert sorted(ranks(3, leave_together)) == [[], [], [True]]


def renew_one_after_another(rank: int, n: int) -> bool:
    """Return whether all ranks had made their groups when this one went on; each takes longer than the last."""
    guard = FaultGuard("test", rank, n, list, str)
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
    """A rank that went on could fail at once, while others still wait, uninterruptibly, to make their groups."""
    assert ranks(3, renew_one_after_another) == [True, True, True]


def renew_in_vain(rank: int, n: int) -> str:
    """Return this rank's error if rank 1 cannot make its groups."""
    guard = FaultGuard("test", rank, n, list, str)
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
    """Ranks that have made their own groups do not wait until a time limit."""
    first, second, third = ranks(3, renew_in_vain, limit_s=20)
    assert second == "the groups of ranks cannot be made again: Connection closed by peer"
    assert first == third and second in first


def go_on_alone(rank: int, n: int, how: str) -> str:
    """Return the error of rank 0, which goes on after a failure while the functions of the other ranks end."""
    guard = FaultGuard("test", rank, n, list, str)
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
    """A forked process runs no functions that are registered for a program's end, and a failure has broken groups."""
    assert ranks(2, go_on_alone, how, limit_s=20)[0] == f"rank 1 of 2 has {told}"


ALL, ROWS = (0, 1, 2), ((0, 1), (2,))


def leave_early(rank: int, n: int, meets: str, dies: bool) -> list[str]:
    """Return rank 0's errors in a call that rank 2 finished before it left, and in the next call."""
    guard, store, found = FaultGuard("test", rank, n, list, str), clone_store(), []

    def look() -> str:
        """Give the guard's thread time to look, and return the error, if any."""
        time.sleep(0.5)
        try:
            guard.check()
        except RankError as error:
            return str(error)
        return "broken off" if guard.has_broken_off else "goes on"

    needed = frozenset(ROWS[rank // 2]) if meets == "by itself" else None
    with suppress(RankError), guard.watch(30, needed=needed):
        guard.note_collective(ALL if meets == "all" else ROWS[rank // 2])
        if rank != 2:
            store.wait(["rank 2 has left"])
            if rank == 1 and dies:
                os._exit(3)
            if dies:
                look_until(lambda: guard.has_broken_off, 30)
            found.append(look())
    if rank == 2:
        _end_started()
        store.set("rank 2 has left", "1")
    elif not dies:
        with pytest.raises(RankError) as caught, guard.watch(30):
            look_until(lambda: guard.has_broken_off, 30)
            guard.check()
        found.append(str(caught.value))
    guard.rest()
    return found


LEFT = "rank 2 of 3 has left: its program has ended, and it makes no more calls"


def test_a_rank_may_leave_while_others_are_in_a_call_that_it_has_finished() -> None:
    """They raised that it had left, though nothing of it was waited for: at the end of a script, now and then."""
    first, second, _ = ranks(3, leave_early, "all", False)
    assert first == second == ["goes on", LEFT]


def test_a_rank_that_has_not_finished_a_call_is_missed_after_one_that_has() -> None:
    first, _, _ = ranks(3, leave_early, "all", True, dying=[1])
    assert first[0].startswith("rank 1 of 3 has left: its program has ended without a message")


def test_of_other_pipelines_of_a_mesh_only_what_all_ranks_finish_counts() -> None:
    first, second, _ = ranks(3, leave_early, "row", False)
    assert first == second == [LEFT, LEFT]


def test_a_call_of_one_pipeline_of_a_mesh_does_not_miss_ranks_of_another() -> None:
    """Once a pipeline's slower transfer of weights was refused as soon as another pipeline had ended normally."""
    first, second, _ = ranks(3, leave_early, "by itself", False)
    assert first == second == ["goes on", LEFT]
