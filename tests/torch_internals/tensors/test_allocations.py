"""Peak memory of a block, including memory that it frees before it ends."""

from __future__ import annotations

import gc
from typing import Any

import torch

from fxsplit.torch_internals.tensors.allocations import count_allocations


def test_the_most_at_once_counts() -> None:
    with count_allocations() as found:
        one = torch.ones(1000)
        two = one + 1
        del one, two
        _ = torch.ones(10)
    # The number that is added may be a tensor too.
    assert found.peak_bytes is not None and 8000 <= found.peak_bytes < 8100


def test_autograd_counts_too() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = x.exp()
    seed = torch.ones(1000)
    with count_allocations() as found:
        (gradient,) = torch.autograd.grad(y, x, seed)
    assert found.peak_bytes == gradient.nbytes


def test_older_memory_that_the_collector_frees_does_not_count() -> None:
    """Python's collector came by chance inside the block, and the peak was too small by what it freed."""
    threshold = gc.get_threshold()
    # The profiler reports only frees of memory whose allocation it has seen.
    with count_allocations():
        ring: list[Any] = [torch.ones(1000)]
    ring.append(ring)
    del ring
    try:
        with count_allocations() as found:
            gc.set_threshold(1, 1, 1)
            others = [[i] for i in range(1000)]
            kept = torch.ones(1000)
        assert gc.isenabled() and len(others) == 1000
    finally:
        gc.set_threshold(*threshold)
    assert found.peak_bytes is not None and kept.nbytes <= found.peak_bytes < kept.nbytes + 100


def test_where_a_profiler_runs_nothing_is_known() -> None:
    with torch.autograd.profiler.profile(), count_allocations() as found:
        torch.ones(10)
    assert found.peak_bytes is None
