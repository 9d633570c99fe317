"""Progress: who listens hears of each item once it is done."""

from __future__ import annotations

import threading
from contextvars import copy_context

import pytest

from fxsplit.system.progress import listen, track

Heard = list[tuple[str, int, int]]


def test_items_are_told_after_they_are_done() -> None:
    heard: Heard = []
    with listen(lambda *told: heard.append(told)):
        items = track("ab", "work")
        assert next(items) == "a" and heard == []
        assert next(items) == "b" and heard == [("work", 1, 2)]
        assert list(items) == [] and heard == [("work", 1, 2), ("work", 2, 2)]
    assert list(track("ab", "later")) == ["a", "b"] and len(heard) == 2, "outside of the block nobody listens"


def test_the_inner_listener_hears_and_the_outer_one_comes_back() -> None:
    outer: Heard = []
    inner: Heard = []
    with listen(lambda *told: outer.append(told)):
        with pytest.raises(ValueError, match="inside"), listen(lambda *told: inner.append(told)):
            list(track("a", "inner"))
            raise ValueError("inside")
        list(track("a", "outer"))
    assert inner == [("inner", 1, 1)] and outer == [("outer", 1, 1)]


def test_a_thread_hears_for_its_caller_alone() -> None:
    heard: Heard = []
    with listen(lambda *told: heard.append(told)):
        context = copy_context()
        for run in (lambda: list(track("a", "other")), lambda: context.run(lambda: list(track("a", "own")))):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert heard == [("own", 1, 1)]
