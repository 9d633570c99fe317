"""Every Ctrl-C during a marked function comes out of it, once, and the handler of SIGINT is the program's own again."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fxsplit.system import interrupts
from fxsplit.system.interrupts import lose_no_interrupt, raise_lost_interrupt
from tests.support.interrupts import interrupt_at, list_lines


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Python's own handler, which test processes may lack; afterwards it must still be there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function in which Ctrl-C is pressed at the worst time."""
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))

    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def lose() -> None:
        before = len(dropped)
        Finalised()
        assert dropped[before:] == [KeyboardInterrupt], "Python drops what a finaliser raises"

    return lose


@lose_no_interrupt
def run(*steps: Callable[[], object]) -> str:
    for step in steps:
        step()
    return "done"


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise RuntimeError("of its own")


def test_an_interrupt_in_a_finaliser_comes_out_at_the_end(lose: Callable[[], None]) -> None:
    """It was printed by Python, and the function returned as if nothing had been pressed."""
    went_on: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(lose, lambda: went_on.append(1))
    assert went_on == [1]
    assert run() == "done", "an interrupt is not raised again by the next call"


def test_an_interrupt_that_was_dropped_by_code_comes_out_at_the_end() -> None:
    def drop() -> None:
        try:
            press()
        except BaseException:
            return

    with pytest.raises(KeyboardInterrupt):
        run(drop)


def test_a_lost_interrupt_comes_out_at_the_next_look(lose: Callable[[], None]) -> None:
    went_on: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(raise_lost_interrupt, lose, raise_lost_interrupt, lambda: went_on.append(1))
    assert went_on == []
    raise_lost_interrupt()


def test_an_error_after_a_lost_interrupt_is_its_cause(lose: Callable[[], None]) -> None:
    """The interrupted work may have caused the error, and the user who pressed Ctrl-C waits for the interrupt."""
    with pytest.raises(KeyboardInterrupt) as caught:
        run(lose, fail)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="of its own"):
        run(fail)


def test_an_interrupt_that_comes_out_is_not_raised_twice(lose: Callable[[], None]) -> None:
    caught = 0
    try:
        run(lambda: run(press))
    except KeyboardInterrupt as error:
        caught += 1
        assert error.__cause__ is None
    # The one pressed outside of any function is Python's own business.
    lose()
    assert (caught, run()) == (1, "done")


def test_an_inner_function_leaves_it_to_the_outermost(lose: Callable[[], None]) -> None:
    inner: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(lambda: inner.append(run(lose)), lambda: inner.append("next"))
    assert inner == ["done", "next"]


@pytest.mark.parametrize("own", [signal.SIG_IGN, signal.SIG_DFL, lambda number, frame: None])
def test_a_handler_of_the_users_is_left_alone(own: Any) -> None:
    seen: list[Any] = []
    before = signal.signal(signal.SIGINT, own)
    try:
        run(lambda: seen.append(signal.getsignal(signal.SIGINT)))
        assert seen[0] is own or seen == [own]
        assert signal.getsignal(signal.SIGINT) == own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_meanwhile_stays(lose: Callable[[], None]) -> None:
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    replaced: list[Any] = []
    try:
        assert run(lambda: replaced.append(signal.signal(signal.SIGINT, hear)), press, run) == "done"
        assert signal.getsignal(signal.SIGINT) is hear and heard == [signal.SIGINT]
        # A debugger restores the handler that it found, perhaps after the call.
        signal.signal(signal.SIGINT, replaced[0])
        with pytest.raises(KeyboardInterrupt):
            press()
        raise_lost_interrupt()
        with pytest.raises(KeyboardInterrupt):
            run(lose)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_touch_nothing(lose: Callable[[], None]) -> None:
    seen: list[Any] = []

    def work() -> None:
        seen.append(run(lambda: seen.append(signal.getsignal(signal.SIGINT)), raise_lost_interrupt))

    def work_beside() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    work_beside()
    assert seen == [signal.default_int_handler, "done"]
    with pytest.raises(KeyboardInterrupt):
        run(lose, work_beside)
    assert seen[3:] == ["done"], "the interrupt is the main thread's"


def test_every_line_may_be_interrupted() -> None:
    lines = list_lines(lambda: run(list))
    assert len(lines) > 25, "lines of interrupts.py and of contextlib"
    for number in range(len(lines)):
        with pytest.raises(KeyboardInterrupt), interrupt_at(number):
            run(list)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # A flag that was left would take the next call for an inner one.
        seen: list[Any] = []
        run(lambda: seen.append(signal.getsignal(signal.SIGINT)))  # noqa: B023
        assert seen[0] is not signal.default_int_handler


def make_caller(name: str, path: str) -> Callable[[Callable[[], object]], object]:
    """Return a function of this name, in a file of this path, that calls its argument."""
    scope: dict[str, Any] = {}
    exec(compile(f"def {name}(act):\n    return act()\n", path, "exec"), scope)
    found: Callable[[Callable[[], object]], object] = scope[name]
    return found


IN_TORCH, OUTSIDE = os.path.join("x", "torch", "fake.py"), os.path.join("x", "own.py")


@contextmanager
def press_when_entered(done: list[str]) -> Iterator[None]:
    press()
    done.append("entered")
    yield


@pytest.mark.parametrize(
    ("name", "path", "waits"),
    [
        ("__torch_dispatch__", IN_TORCH, True),
        ("__enter__", IN_TORCH, True),
        ("__exit__", IN_TORCH, True),
        ("forward", IN_TORCH, False),
        ("__exit__", OUTSIDE, False),
    ],
)
def test_an_interrupt_waits_while_torch_dispatches_or_switches(
    name: str, path: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the process in C++ code that must not throw, or left torch in a mode."""
    monkeypatch.setattr(interrupts, "MOST_S", 1000.0)
    done: list[str] = []

    def press_deep() -> None:
        def press_at(depth: int) -> None:
            if depth:
                press_at(depth - 1)
            else:
                press()

        press_at(20)
        done.append("went on")

    @lose_no_interrupt
    def work() -> None:
        make_caller(name, path)(press_deep)
        time.sleep(300)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["went on"] * waits and time.monotonic() - begin < 100
    time.sleep(0.05)  # nothing is sent once the call is over


@pytest.mark.parametrize(("path", "waits"), [(IN_TORCH, True), (OUTSIDE, False)])
def test_an_interrupt_waits_while_torch_uses_a_context_of_its_own(
    path: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "MOST_S", 1000.0)
    done: list[str] = []

    scope: dict[str, Any] = {"manager": press_when_entered, "done": done}
    lines = "def use():\n    with manager(done):\n        done.append('inside')\n"
    exec(compile(lines, path, "exec"), scope)
    with pytest.raises(KeyboardInterrupt):
        lose_no_interrupt(scope["use"])()
    assert done == ["entered", "inside"] * waits


def test_an_interrupt_does_not_wait_for_an_operator_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "MOST_S", 0.1)

    def run_for_ever() -> None:
        press()
        while True:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        lose_no_interrupt(make_caller("__torch_dispatch__", IN_TORCH))(run_for_ever)
    time.sleep(0.05)


def test_an_interrupt_at_the_end_of_a_switch_comes_out_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        lose_no_interrupt(make_caller("__exit__", IN_TORCH))(press)
    time.sleep(0.05)
