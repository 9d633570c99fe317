"""Code that runs in the middle of a call, but does not belong to it."""

from __future__ import annotations

from typing import Any

from fxsplit.frontend.restore.asides import begin_aside, keep_notes


class Log:
    def __init__(self) -> None:
        self.now, self.accepted = 0, list[tuple[int, int, bool]]()

    def read(self) -> int:
        return self.now

    def accept(self, begun: Any, *, new_only: bool) -> None:
        self.accepted.append((begun, self.now, new_only))


def test_all_who_take_notes_accept_what_an_aside_changes() -> None:
    outer, inner, later = Log(), Log(), Log()
    with keep_notes(outer):
        with keep_notes(inner):
            end = begin_aside()
            outer.now = inner.now = 2
            end()
        outer.now = 3
        end = begin_aside(new_only=True)
        with keep_notes(later):
            outer.now = 4
            end()
    begin_aside()()
    assert outer.accepted == [(0, 2, False), (3, 4, True)]
    assert inner.accepted == [(0, 2, False)] and later.accepted == []
