"""Measure the peak memory of a piece of work, including allocations inside operators, on a CPU or an accelerator.

torch reports every allocation and free to its profiler, in order. The sizes of results would not show what an operator
allocates while it runs, such as a copy of its input in another layout.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from fxsplit.torch_internals.scopes.undo import restore_after


@dataclass
class Allocations:
    """The peak of the memory that the block of `count_allocations` allocated, in bytes, on top of earlier allocations.

    peak_bytes: set when the block ends. None if a profiler was already running in this thread.
    """

    peak_bytes: int | None = None


@contextmanager
def count_allocations() -> Iterator[Allocations]:
    """Count this thread's allocations inside the block, on all devices, including those in autograd's threads."""
    found = Allocations()
    if _profiler_enabled():
        yield found
        return
    # Python's collector may come at any moment, and would free memory of an earlier block inside this one.
    with restore_after(gc.enable) if gc.isenabled() else nullcontext():
        gc.disable()
        # Record memory only: no shapes, no stacks, no kernel times.
        no_more = _ExperimentalConfig()
        _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, no_more))
        try:
            yield found
        finally:
            threads = _disable_profiler_legacy()
    held = peak = 0
    # Each autograd thread has its own list of events, and the caller waits while it runs.
    for event in (event for events in threads for event in events):
        if str(event.kind()) == "memory_alloc":
            held += event.cpu_memory_usage() + event.cuda_memory_usage()
            peak = max(peak, held)
    found.peak_bytes = peak
