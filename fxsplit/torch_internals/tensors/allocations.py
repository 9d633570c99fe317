"""Count what a piece of work allocates: the most at once, also inside of operators, on a CPU or on an accelerator.

torch tells its profiler of every piece of memory that it takes and gives back, in order. The sizes of the results alone
would say nothing of what an operator takes while it runs: for example a copy of its input in another layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig


@dataclass
class Allocations:
    """What the block of `count_allocations` allocates: the most that it holds at once, beside what was there before.

    In bytes, and known once the block has ended. None where a profiler runs in this thread already.
    """

    peak_bytes: int | None = None


@contextmanager
def count_allocations() -> Iterator[Allocations]:
    """Count what this thread allocates inside the block, on all devices, with what autograd does for it."""
    found = Allocations()
    if _profiler_enabled():
        yield found
        return
    # Memory alone is recorded, with neither shapes nor stacks nor the times of an accelerator's kernels.
    no_more = _ExperimentalConfig()
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, no_more))
    try:
        yield found
    finally:
        threads = _disable_profiler_legacy()
    held = peak = 0
    # Each thread that autograd works in has a list of its own, and the caller's waits meanwhile.
    for event in (event for events in threads for event in events):
        if str(event.kind()) == "memory_alloc":
            held += event.cpu_memory_usage() + event.cuda_memory_usage()
            peak = max(peak, held)
    found.peak_bytes = peak
