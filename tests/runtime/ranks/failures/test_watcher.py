"""A failure on one rank reaches all ranks, also ranks that wait inside torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxsplit.runtime.ranks.failures import watcher as watcher_module
from fxsplit.runtime.ranks.failures.board import FaultBoard
from fxsplit.runtime.ranks.failures.faults import Fault
from fxsplit.runtime.ranks.failures.watcher import FaultWatcher
from fxsplit.torch_internals.distributed.process_groups import break_waits, clone_store
from tests.support.ranks import ranks

WAIT_S = 120
"""How long gloo waits: far longer than a busy machine takes to wake it."""


class Caught(Exception):
    """An exception that the tests define, and so every rank knows."""


def job(rank: int, world: int, act: Callable[[int], None], limit_s: float, collective: bool = False) -> Any:
    """Call `act`, then wait for messages that never come. Returns the error, and the seconds until it came."""
    group = dist.new_group(list(range(world)), timedelta(seconds=WAIT_S))
    board = FaultBoard(clone_store(), "test", rank, world)
    watcher = FaultWatcher(
        FaultBoard(clone_store(), "test", rank, world), lambda: break_waits(group), lambda: f"at {rank}"
    )
    dist.barrier()
    begun = time.monotonic()
    try:
        with watcher.watch(limit_s):
            act(rank)
            if collective:
                dist.all_reduce(torch.ones(3), group=group)
            else:
                dist.recv(torch.empty(4), (rank + 1) % world, group=group)
        raise AssertionError("nothing was raised")
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        own = isinstance(error, (Caught, KeyboardInterrupt))
        fault = board.post(Fault.of(error, rank)) if own else board.wait_for_fault(60.0)
        took = time.monotonic() - begun
    finally:
        watcher.rest()
    assert fault is not None
    board.end_turn()
    made = fault.make_error(world)
    # The default group goes on.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == world
    return took, {kind.__name__ for kind in type(made).__mro__}, str(made), interrupted


def raise_on_1(rank: int) -> None:
    if rank == 1:
        time.sleep(0.3)
        raise Caught("it is broken")


@pytest.mark.parametrize("collective", [False, True])
def test_an_error_of_one_rank_wakes_the_others(collective: bool) -> None:
    """They wait in gloo, and hear of the error long before that gives up, in a tenth of a second on a free machine."""
    for took, kinds, text, _ in ranks(3, job, raise_on_1, 30.0, collective):
        assert 0.3 <= took < WAIT_S / 2
        assert {"RankError", "Caught"} <= kinds
        assert text == "rank 1 of 3 has raised Caught: it is broken"


def fail_after_a_rest(rank: int, world: int) -> Any:
    """The thread has gone to sleep, as there was no job for a while, and is woken by the next one."""
    watcher_module.IDLE_LOOKS = 0
    board, watched = (FaultBoard(clone_store(), "rest", rank, world) for _ in range(2))
    heard = threading.Event()
    watcher = FaultWatcher(watched, heard.set, lambda: "")
    with watcher.watch(30.0):
        pass
    until = time.monotonic() + 60
    while not watcher._sleeps and time.monotonic() < until:
        time.sleep(0.01)
    with watcher.watch(30.0):
        board.post(Fault.of(Caught("late"), rank))
        found = heard.wait(60)
    watcher.rest()
    return found


def test_a_thread_that_has_gone_to_sleep_is_woken() -> None:
    assert ranks(1, fail_after_a_rest) == [True]


def watch_in_another(rank: int, world: int) -> tuple[bool, bool, bool]:
    """Return whether a block is given up at the firm limit of the one around it: with a stopped clock, and without."""
    board, heard = FaultBoard(clone_store(), "firm", rank, world), threading.Event()
    watcher = FaultWatcher(board, heard.set, lambda: "")
    with watcher.watch(0.3, firm=True), watcher.watch(600.0):
        inside = heard.wait(60)
    heard.clear()
    board.end_turn()
    with watcher.watch(0.5, firm=True), watcher.watch(600.0):
        with watcher.stop_clock(600.0):
            stopped = heard.wait(1.5)
        after = heard.wait(60)
    watcher.rest()
    return inside, stopped, after


def test_a_firm_limit_holds_for_blocks_inside_but_where_the_clock_stands_still() -> None:
    """A step's limit includes all waits inside it, but not a compile that it begins."""
    assert ranks(1, watch_in_another) == [(True, False, True)]


def sleep_on_2(rank: int) -> None:
    if rank == 2:
        time.sleep(2.5)


def test_a_limit_says_what_each_rank_waits_for() -> None:
    for took, kinds, text, _ in ranks(3, job, sleep_on_2, 0.5):
        assert 0.5 <= took < WAIT_S / 2
        assert "StepTimeout" in kinds
        assert "longer than 0.5 s" in text
        assert all(f"rank {r}: at {r}" in text for r in range(3)), "the thread of a rank that computes answers too"


def interrupt_0(rank: int) -> None:
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_interrupt_reaches_a_rank_that_waits_inside_of_torch() -> None:
    """Python handles signals between its own instructions, and a wait of gloo takes as long as it takes."""
    found = ranks(2, job, interrupt_0, 30.0)
    assert [one[3] for one in found] == [True, False]
    for took, _, text, _ in found:
        assert 0.3 <= took < WAIT_S / 2
        assert text == "rank 0 of 2 has raised KeyboardInterrupt: KeyboardInterrupt"


def ignore_1(rank: int) -> None:
    """A signal that a program handles itself ends nothing."""
    if rank == 0:
        signal.signal(signal.SIGINT, lambda *_: None)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(0.5)
    raise_on_1(rank)


def test_a_signal_that_the_program_handles_ends_no_wait() -> None:
    for took, _, text, _ in ranks(2, job, ignore_1, 30.0):
        assert took >= 0.8 and "has raised Caught" in text
