"""Peak memory of a block, including memory that it frees before it ends."""

from __future__ import annotations

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


def test_where_a_profiler_runs_nothing_is_known() -> None:
    with torch.autograd.profiler.profile(), count_allocations() as found:
        torch.ones(10)
    assert found.peak_bytes is None
