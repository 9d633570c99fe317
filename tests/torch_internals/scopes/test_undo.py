"""Temporary changes are undone, whichever line an interrupt comes at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from fxsplit.torch_internals.scopes.undo import CallerLock, call_all, restore_after, restores_all
from tests.support.interrupts import interrupt_at, list_lines

State = dict[str, int]


@restores_all
def change(state: State, turn: CallerLock) -> None:
    with turn.take(), restore_after(partial(state.__setitem__, "a", state["a"])):
        state["a"] += 1
        with restore_after(partial(state.update, dict(state))):
            state["a"] += 1
            state["b"] += 1
        assert state == {"a": 2, "b": 1}, "the block inside is undone"


def test_every_line_may_be_interrupted() -> None:
    """A change before its `try`, or a `finally` that was cut off, stayed for ever; so did a lock."""
    state, turn = {"a": 1, "b": 1}, CallerLock()
    lines = list_lines(partial(change, state, turn))
    assert len(lines) > 60, "lines of undo.py, of contextlib and of this file"
    for number in range(len(lines)):
        with pytest.raises(KeyboardInterrupt), interrupt_at(number):
            change(state, turn)
        assert state == {"a": 1, "b": 1} and not turn.mine
        # A lock that is held by nobody can be taken by another thread.
        other = threading.Thread(target=change, args=({"a": 1, "b": 1}, turn))
        other.start()
        other.join(5.0)
        assert not other.is_alive()


def test_what_is_undone_late_is_not_undone_again() -> None:
    """The block of an interrupted generator ends when the garbage collector comes, which may be much later."""
    state = {"a": 1}
    block = restore_after(partial(state.__setitem__, "a", 1))

    @restores_all
    def interrupted() -> None:
        block.__enter__()
        state["a"] = 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert state["a"] == 1
    state["a"] = 3
    block.__exit__(None, None, None)
    assert state["a"] == 3


def test_what_is_undone_inside_out() -> None:
    undone: list[str] = []
    inner = restore_after(partial(undone.append, "inner"))

    @restores_all
    def work() -> None:
        with restore_after(partial(undone.append, "outer")):
            inner.__enter__()

    work()
    assert undone == ["inner", "outer"]


def test_a_turn_is_taken_once_more_by_its_holder_alone() -> None:
    turn = CallerLock()
    taken = threading.Event()

    def other() -> None:
        with turn.take():
            taken.set()

    with turn.take():
        with turn.take():
            assert turn.mine
        thread = threading.Thread(target=other)
        thread.start()
        assert turn.mine and not taken.wait(0.05)
    assert taken.wait(5.0)
    thread.join()


def test_a_turn_is_lent_for_a_block_and_taken_back() -> None:
    turn = CallerLock()

    def other() -> None:
        with turn.take():
            pass

    held: list[bool] = []
    with turn.take():
        with turn.take(), turn.lend():
            held.append(turn.mine)
            thread = threading.Thread(target=other, daemon=True)
            thread.start()
            thread.join(10.0)
            assert not thread.is_alive()
        held.append(turn.mine)
        waits = threading.Thread(target=other, daemon=True)
        waits.start()
        waits.join(0.05)
        assert waits.is_alive()
    waits.join(10.0)
    assert not waits.is_alive()
    # Nothing is lent of a lock that nobody holds.
    with turn.lend():
        held.append(turn.mine)
    assert [*held, turn.mine] == [False, True, False, False]


def test_who_waits_for_a_turn_is_in_a_block_meanwhile() -> None:
    said: list[str] = []
    entered = threading.Event()

    @contextmanager
    def say() -> Iterator[None]:
        said.append("waits")
        entered.set()
        yield
        said.append("has it")

    turn = CallerLock(say)

    def other() -> None:
        with turn.take():
            said.append("works")

    with turn.take():
        assert said == []
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert entered.wait(10.0)
    thread.join(10.0)
    assert said == ["waits", "has it", "works"]


def test_calls_one_after_the_other() -> None:
    done: list[int] = []
    with pytest.raises(ZeroDivisionError):
        call_all([partial(done.append, 1), partial(divmod, 1, 0), partial(done.append, 2)])
    assert done == [1]
