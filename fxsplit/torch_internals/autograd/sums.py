"""Sum the gradients of microbatches beside `.grad`, so that a step changes `.grad` once, at its end, or not at all.

The backwards of a stage call `differentiate` and hand what it returns to the stage's `Sums`. When all workers are done,
the caller merges the sums of all stages and calls `accumulate` (see grad_accumulate.py).
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
"""A leaf, the gradient that one microbatch adds to it, and whether no other object refers to that gradient."""


class Sums:
    """The gradients of leaves, summed over the microbatches of one job. One worker adds, the caller reads at the end.

    `totals` has the sum for each leaf that got a gradient. The sums are not kept in `.grad`, because a worker that the
    caller has given up on (Ctrl-C) may still add to them.
    """

    def __init__(self, totals: dict[Tensor, Tensor] | None = None) -> None:
        self.totals: dict[Tensor, Tensor] = totals or {}

    def add(self, shares: Iterable[Share]) -> None:
        """Add gradients to the sums of their leaves. No gradient that another object refers to is written to."""
        totals, more = [], []
        for leaf, gradient, unshared in shares:
            total = self.totals.get(leaf)
            if total is None:
                # The sum needs memory of its own, since later gradients are added to it in place.
                self.totals[leaf] = gradient if unshared else gradient.clone()
            elif total.is_sparse:
                # torch cannot add a dense tensor to a sparse one in place, and refuses sparse + dense.
                self.totals[leaf] = gradient + total
            else:
                totals.append(total)
                more.append(gradient)
        if totals:
            # One call for all leaves: each call gives up the interpreter lock, and waits to get it back.
            torch._foreach_add_(totals, more)


def differentiate(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    ends: Sequence[Tensor | GradientEdge],
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `ends`, from the gradients of `roots`; None for an end that no root depends on.

    A root or an end is a tensor, or an edge of the autograd graph. This is torch.autograd.grad(allow_unused=True)
    without its checks of arguments: they are right here, and the checks took a third of the time of a small action.
    """
    # Torch's function also hands this thread's context variables to those that autograd starts. Where it starts none,
    # as in workers, that is left out: what a thread keeps for them is copied for each node of the graph.
    threads = torch.autograd.is_multithreading_enabled()
    run = _engine_run_backward if threads else torch.autograd.Variable._execution_engine.run_backward
    # The constants are create_graph=False and allow_unreachable=True.
    found: tuple[Tensor | None, ...] = run(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(ends), True, accumulate_grad=False
    )
    return found


def make_shares(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], unshared: Sequence[bool]) -> list[Share]:
    """Return each leaf with its gradient and whether that is unshared, without the leaves that got none."""
    return [(leaf, g, alone) for leaf, g, alone in zip(leaves, gradients, unshared, strict=True) if g is not None]


def find_unshared(gradients: Sequence[Tensor | None], begin: int = 0, end: int | None = None) -> list[bool]:
    """Return, for each gradient, whether no other tensor shares its memory and no other object refers to it.

    Such a gradient may be added to in place. `gradients` is the tuple that autograd has just returned, of which those
    from number `begin` up to `end` are asked about. A gradient may be shared, because autograd gives one tensor to
    several leaves, gives two views of one tensor, or keeps it, and because a hook may have stored it.

    Where the answer is False, `Sums.add` copies. To copy all first gradients took 5 % of a step's processor time on
    VGG-16 (16 rows in 4 microbatches on two CPU workers), none that could be measured on a transformer, and on a GPU
    the memory of all weights once more. `bench_runtime.py -k copies` measures it.
    """
    # No slice of the tuple, which would refer to the gradients as well.
    asked = islice(gradients, begin, end)
    return [g is not None and sys.getrefcount(g) <= _REFERENCES and owns_its_memory(g) for g in asked]


# The tuple's reference, the loop variable's, and the one that the call itself holds; counted, as versions of Python
# differ in whether they count the last two.
(_REFERENCES,) = [sys.getrefcount(one) for one in (object(),)]


def owns_its_memory(gradient: Any, holders: int = 1) -> bool:
    """Return whether only so many `holders` in C++ hold a gradient, and no other tensor has the memory that it is in.

    The one holder of a tensor that C++ code has let go of is its object in Python.
    """
    # An expanded tensor, such as the gradient of a sum, has many elements in one place: each write would hit them all.
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
    # A linear layer's weight gets the transpose of a product: a view, whose base only the view itself refers to.
    base = gradient._base
    return tensors == 2 and base._use_count() == 2 and sys.getrefcount(base) <= _count_base_references()


@cache
def _count_base_references() -> int:
    """Return the reference count of a view's base that only the view refers to, as `owns_its_memory` sees it."""
    gradient = torch.ones(2, 2).t()
    base = gradient._base
    return sys.getrefcount(base)
