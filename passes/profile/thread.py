"""The thread that measures: it is set up like the runtime's workers, and stops if the caller is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from fxsplit.torch_internals.autograd.leaves import mute
from fxsplit.torch_internals.scopes.undo import restore_after
from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.thread_modes import ThreadModes

R = TypeVar("R")


class _Measurement(threading.local):
    """The state of the thread that measures: `stop` is set if the thread must stop."""

    def __init__(self) -> None:
        self.stop = threading.Event()


_measurement = _Measurement()


def check_stop() -> None:
    """Raise InterruptedError if whoever waits for this measurement was interrupted."""
    if _measurement.stop.is_set():
        raise InterruptedError("profiling was interrupted")


@contextmanager
def use_own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a new stream of an accelerator. On a CPU this does nothing.

    Work that was queued before is finished when the block begins. The work of the block is finished when the block
    ends.
    """
    if not accelerators.is_accelerator(device):
        yield
        return
    accelerators.synchronize(device)
    own = accelerators.use_stream(accelerators.make_stream(device))
    with restore_after(partial(accelerators.synchronize, device)), own:
        yield


def run_in_worker_thread(run: Callable[[], R], intraop_threads: int, device: torch.device) -> R:
    """Call `run` in a thread set up like the runtime's workers on `device`, in the caller's modes. Return its result.

    Operators then use as many threads, and the same kind of memory pool, as in the pipeline. Raises the exception of
    `run`. If the caller is interrupted, the thread ends first.
    """
    # A user's hooks on saved tensors are for the user's own graph, not for a measured one.
    context = replace(ThreadModes.read(), hooks=None)
    # Each measurement has its own flag: the next one must not revive a thread that was stopped.
    done, stop = Future[R](), threading.Event()

    def work() -> None:
        _measurement.stop = stop
        try:
            # The interrupt may have come before this thread was registered.
            check_stop()
            torch.get_num_threads()  # sets up torch in a new thread, otherwise the next line has no effect
            torch.set_num_threads(intraop_threads)
            # These gradients belong to no batch. Autograd must run in this thread, so that its host time is measured.
            own_thread = torch.autograd.set_multithreading_enabled(False)
            with context.enter(), mute(()), own_thread, use_own_stream(device):
                done.set_result(context.variables.run(run))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work, name="fxsplit-profile", daemon=True)

    def end() -> None:
        # On Ctrl-C the callers restore buffers, so the thread must end first. Wait for the future instead of joining:
        # after an interrupted join, the next join returns at once.
        stop.set()
        if thread.is_alive():
            wait([done])

    with restore_after(partial(torch.set_num_threads, torch.get_num_threads())), restore_after(end):
        thread.start()
        return done.result()
