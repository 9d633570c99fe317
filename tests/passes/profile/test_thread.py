"""The thread of a measurement: its modes, its stream, and its end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

from fxsplit.passes.profile.thread import run_in_worker_thread
from fxsplit.torch_internals.tensors import accelerators

CPU = torch.device("cpu")


def test_a_worker_thread_has_the_callers_modes_and_its_own_number_of_threads() -> None:
    def run() -> tuple[bool, int, bool]:
        return torch.is_grad_enabled(), torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    before = torch.get_num_threads()
    with torch.no_grad():
        assert run_in_worker_thread(run, 1, CPU) == (False, 1, False)
    assert run_in_worker_thread(run, 1, CPU)[0] and torch.get_num_threads() == before
    with pytest.raises(ZeroDivisionError):
        run_in_worker_thread(lambda: 1 / 0, 1, CPU)


def test_an_interrupt_waits_for_the_thread() -> None:
    """A thread that is joined twice, first in vain, was taken for ended, and wrote to buffers restored by then."""
    ended: list[bool] = []

    def run() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3)
        ended.append(True)

    # Python installs no handler if the tests run as a background job of a shell.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_worker_thread(run, 1, CPU)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == [True]


def test_a_measurement_on_an_accelerator_has_a_stream_of_its_own() -> None:
    """The block begins after all earlier work of the device, and ends before the caller goes on, even if it fails."""
    told: list[str] = []

    @contextmanager
    def use_stream(stream: str) -> Iterator[None]:
        told.append(f"use {stream}")
        yield
        told.append("leave")

    with ExitStack() as stack:
        for name, stand_in in {
            "is_accelerator": lambda device: True,
            "make_stream": lambda device: f"a stream of {device}",
            "use_stream": use_stream,
            "synchronize": lambda device: told.append(f"wait for {device}"),
        }.items():
            stack.enter_context(patch.object(accelerators, name, stand_in))
        run_in_worker_thread(lambda: told.append("run"), 1, CPU)
        expected = ["wait for cpu", "use a stream of cpu", "run", "leave", "wait for cpu"]
        assert told == expected
        told.clear()
        with pytest.raises(ZeroDivisionError):
            run_in_worker_thread(lambda: 1 / 0, 1, CPU)
        assert told[-1] == "wait for cpu" and told.count("wait for cpu") == 2


def test_backwards_run_in_the_measurements_own_thread() -> None:
    """In autograd's own thread, the host's time would be another thread's."""
    assert torch.autograd.is_multithreading_enabled()
    assert not run_in_worker_thread(torch.autograd.is_multithreading_enabled, 1, CPU)
    assert torch.autograd.is_multithreading_enabled()
