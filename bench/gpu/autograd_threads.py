"""Lets workers run their backwards themselves, to tell whether autograd's own threads are what a failure comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch

from fxsplit.torch_internals.thread_modes import ThreadModes


def run_backwards_in_workers() -> AbstractContextManager[object]:
    """Return a context in which a worker that calls autograd runs all of the backward in its own thread.

    By default autograd hands a GPU's part of a backward to one thread that it keeps for each GPU.
    """
    # Workers enter the caller's modes around all that they run, so this is where one more mode belongs.
    enter = ThreadModes.enter

    @contextmanager
    def enter_single_threaded(self: ThreadModes) -> Iterator[None]:
        with enter(self), torch.autograd.set_multithreading_enabled(False):
            yield

    return patch.object(ThreadModes, "enter", enter_single_threaded)
