"""Sum the gradients of microbatches outside of `.grad`, so that a step changes `.grad` once, at its end, or not at all.

The backwards of a stage call `differentiate` and add its results to the stage's `Sums`. When all workers are done, the
caller merges the sums of all stages and calls `accumulate` (see accumulate.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

Share = tuple[Tensor, Tensor, bool]
"""A leaf, its gradient from one microbatch, and whether nothing else refers to that gradient."""


class Sums:
    """The gradients of leaves, summed over the microbatches of one job. One worker adds; the caller reads at the end.

    `totals` has the sum for each leaf that got a gradient. The sums are not in `.grad`, because a worker that the
    caller has abandoned (Ctrl-C) may still add to them.
    """

    def __init__(self, totals: dict[Tensor, Tensor] | None = None) -> None:
        self.totals: dict[Tensor, Tensor] = totals or {}

    def add(self, shares: Iterable[Share]) -> None:
        """Add gradients to the sums of their leaves. Never writes to a gradient to which something else refers."""
        totals, more = [], []
        for leaf, gradient, unshared in shares:
            total = self.totals.get(leaf)
            if total is None:
                # Later gradients are added to the sum in place, so it needs its own memory.
                self.totals[leaf] = gradient if unshared else gradient.clone()
            elif total.is_sparse:
                # torch cannot add a dense tensor to a sparse one in place, and refuses sparse + dense.
                self.totals[leaf] = gradient + total
            else:
                totals.append(total)
                more.append(gradient)
        if totals:
            # One call for all leaves, since each call releases the interpreter lock and waits to get it back.
            torch._foreach_add_(totals, more)


def differentiate(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    ends: Sequence[Tensor | GradientEdge],
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `ends`, given the gradients of `roots`; None for an end on which no root depends.

    A root or an end is a tensor or an edge of the autograd graph. Equals torch.autograd.grad(allow_unused=True) without
    its argument checks, which took a third of the time of a small action.
    """
    # torch's wrapper also passes this thread's context variables to autograd's threads. Workers start none, and storing
    # the variables makes autograd copy them for each node of the graph. So skip the wrapper without threads.
    threads = torch.autograd.is_multithreading_enabled()
    run = _engine_run_backward if threads else torch.autograd.Variable._execution_engine.run_backward
    # The constants are create_graph=False and allow_unreachable=True.
    found: tuple[Tensor | None, ...] = run(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def make_shares(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], unshared: Sequence[bool]) -> list[Share]:
    """Return each leaf with its gradient and whether that is unshared. Leaves without a gradient are left out."""
    return [(leaf, g, alone) for leaf, g, alone in zip(leaves, gradients, unshared, strict=True) if g is not None]


def find_unshared(gradients: Sequence[Tensor | None], begin: int = 0, end: int | None = None) -> list[bool]:
    """Return, for each gradient, whether no other tensor shares its memory and nothing else refers to it.

    Such a gradient may be added to in place. `gradients` must be the tuple that autograd has just returned; the entries
    from index `begin` up to `end` are checked. A gradient can be shared because autograd gives one tensor to several
    leaves, gives two views of one tensor, or keeps it, or because a hook has stored it.

    If the answer is False, `Sums.add` copies. Always copying took 5 % of a step's processor time on VGG-16 (16 rows in
    4 microbatches on two CPU workers), and no measurable time on a transformer. On a GPU it would take the memory of
    all weights once more. `bench_runtime.py -k copies` measures it.
    """
    # A slice of the tuple would hold references to the gradients.
    asked = islice(gradients, begin, end)
    return [g is not None and sys.getrefcount(g) <= _REFERENCES and owns_its_memory(g) for g in asked]


# The references of the tuple, the loop variable and the call itself. Measured, since Python versions differ in whether
# they count the last two.
(_REFERENCES,) = [sys.getrefcount(one) for one in (object(),)]


def owns_its_memory(gradient: Any, holders: int = 1) -> bool:
    """Return whether a gradient has at most `holders` C++ holders, and no other tensor shares its memory.

    A tensor that C++ code has released has one holder: its Python object.
    """
    # An expanded tensor, such as the gradient of a sum, has many elements in one place, which a write would all change.
    if (
        gradient.layout != torch.strided
        or gradient._use_count() > holders
        or torch._debug_has_internal_overlap(gradient)
    ):
        return False
    # untyped_storage() makes a handle, which counts as one holder.
    tensors = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) - 1
    if not gradient._is_view():
        return tensors == 1
    # The gradient of a linear layer's weight is a transposed product: a view, and only the view refers to its base.
    base = gradient._base
    return tensors == 2 and base._use_count() == 2 and sys.getrefcount(base) <= _count_base_references()


@cache
def _count_base_references() -> int:
    """Return the reference count of a view's base to which only the view refers, as `owns_its_memory` sees it."""
    gradient = torch.ones(2, 2).t()
    base = gradient._base
    return sys.getrefcount(base)
