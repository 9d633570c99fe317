"""The thread of a measurement: set up like the runtime's workers, and ended when the caller is interrupted."""

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
from fxsplit.torch_internals.scopes.undo import undo_after
from fxsplit.torch_internals.tensors import accelerators
from fxsplit.torch_internals.thread_modes import ThreadModes

R = TypeVar("R")


class _Measurement(threading.local):
    """What the thread of a measurement knows: whether it has been told to stop."""

    def __init__(self) -> None:
        self.stop = threading.Event()


_measurement = _Measurement()


def check_stop() -> None:
    """Raise InterruptedError once the thread that waits for the measurement has been interrupted."""
    if _measurement.stop.is_set():
        raise InterruptedError("profiling was interrupted")


@contextmanager
def use_own_stream(device: torch.device) -> Iterator[None]:
    """Let the calling thread queue the block's work on a new stream of an accelerator; on a CPU do nothing.

    The block begins after, and what follows it after the block, all that is queued on the device.
    """
    if not accelerators.is_accelerator(device):
        yield
        return
    accelerators.synchronize(device)
    own = accelerators.use_stream(accelerators.make_stream(device))
    with undo_after(partial(accelerators.synchronize, device)), own:
        yield


def run_in_worker_thread(run: Callable[[], R], intraop_threads: int, device: torch.device) -> R:
    """Return what `run` returns in a thread set up like the runtime's workers on `device`, with the caller's modes.

    Operators then use as many threads, and memory comes from the same kind of pool, as when the pipeline runs. Raises
    what `run` raises; an interrupt ends the thread first.
    """
    # A user's hooks on saved tensors are for the user's own graph, not for one that is measured.
    context = replace(ThreadModes.read(), hooks=None)
    # Each measurement has a flag of its own: the next one must not revive a thread that was told to stop.
    done, stop = Future[R](), threading.Event()

    def work() -> None:
        _measurement.stop = stop
        try:
            # The interrupt may have come before this thread was known to run.
            check_stop()
            torch.get_num_threads()  # sets up torch in a new thread, without which the next line has no effect
            torch.set_num_threads(intraop_threads)
            # The gradients are of no batch.
            # Autograd must run in this thread: in one of its own, the host's time would be another's.
            own_thread = torch.autograd.set_multithreading_enabled(False)
            with context.enter(), mute(()), own_thread, use_own_stream(device):
                done.set_result(context.variables.run(run))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work, name="fxsplit-profile", daemon=True)

    def end() -> None:
        # Ctrl-C: the callers restore buffers, and the thread must have ended before. It is waited for, never joined:
        # where an interrupt ends a join, the next join returns at once.
        stop.set()
        if thread.is_alive():
            wait([done])

    with undo_after(partial(torch.set_num_threads, torch.get_num_threads())), undo_after(end):
        thread.start()
        return done.result()
