"""Ranks whose programs end tell the others, and do not wait for those that end as well."""

from __future__ import annotations

import pytest

from fxsplit.runtime.ranks.board import Board
from fxsplit.runtime.ranks.guard import Guard
from tests.ranks import ranks


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
