"""Gradients are summed over microbatches beside `.grad`, so that a step changes it once, at its end, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from fxsplit.torch_internals.grad_leaves import list_gradient_hooks

Share = tuple[Tensor, Tensor, bool]
"""A leaf, a gradient of it, and whether nobody else refers to that gradient."""


class Sums:
    """The gradients of leaves, summed over the microbatches of one job: one worker adds, the caller reads at the end.

    Not `.grad` itself: a worker that the caller has given up on (Ctrl-C) may still be in a backward.
    """

    def __init__(self) -> None:
        self.totals: dict[Tensor, Tensor] = {}

    def add(self, shares: Iterable[Share]) -> None:
        """Add gradients; the first of a leaf is copied, unless it is ours alone and can take the others."""
        totals, more = [], []
        for leaf, gradient, own in shares:
            total = self.totals.get(leaf)
            if total is None:
                self.totals[leaf] = gradient if own else gradient.clone()
            elif total.is_sparse:
                self.totals[leaf] = gradient + total
            else:
                totals.append(total)
                more.append(gradient)
        if totals:
            torch._foreach_add_(totals, more)  # one call: each gives up the interpreter, and waits for it afterwards


def differentiate(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    ends: Sequence[Tensor | GradientEdge],
    retain_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `ends` from those of `roots`, or None each; keep the graph if it is needed `again`.

    As torch.autograd.grad does, less its look at the arguments, which are right here and were a third of what a small
    action took.
    """
    return _engine_run_backward(
        tuple(roots), tuple(gradients), retain_graph, False, tuple(ends), True, accumulate_grad=False
    )


def make_shares(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], own: Sequence[bool]) -> list[Share]:
    """Return the gradients that there are, each with its leaf."""
    return [(leaf, g, alone) for leaf, g, alone in zip(leaves, gradients, own, strict=True) if g is not None]


def find_unshared(gradients: Sequence[Tensor | None]) -> list[bool]:
    """Return which of the gradients that autograd has just returned, in a tuple, nobody else refers to.

    Autograd may give one tensor to several leaves, keep it, or give a view of another; a hook may have stored it. To
    add in place spares an allocation of all weights' size, which takes longer than the sum itself.
    """
    return [g is not None and sys.getrefcount(g) <= _REFERENCES and _unshared(g) for g in gradients]


(_REFERENCES,) = [sys.getrefcount(one) for one in (object(),)]
"""How many references an object has that only a tuple holds, when asked in a loop over that."""


def _unshared(gradient: Any) -> bool:
    """Return whether autograd holds a gradient no more, nor anybody the memory that it is in."""
    if gradient.layout != torch.strided or gradient._use_count() != 1 or torch._debug_has_internal_overlap(gradient):
        return False
    holders = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) - 1  # less the handle made here
    if not gradient._is_view():
        return holders == 1
    base = gradient._base  # as of a linear layer's weight, whose gradient is transposed
    return holders == 2 and base._use_count() == 2 and sys.getrefcount(base) <= _base_references()


@cache
def _base_references() -> int:
    """Return how many references the base of a view has that nobody else has seen, when asked as above."""
    gradient = torch.ones(2, 2).t()
    base = gradient._base
    return sys.getrefcount(base)


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """Return one sum of all stages'; a loss may depend on parameters of any of them."""
    whole, *others = parts
    for part in others:
        whole.add((leaf, total, True) for leaf, total in part.totals.items())
    return whole


def accumulate(sums: Sums) -> None:
    """Add sums to `.grad` as autograd would, with the hooks there are."""
    alone = {
        leaf: total for leaf, total in sums.totals.items() if leaf.grad is None and not any(list_gradient_hooks(leaf))
    }
    others = {leaf: total for leaf, total in sums.totals.items() if leaf not in alone}
    if others:  # first, since a hook may raise
        torch.autograd.backward(list(others), list(others.values()))
    for leaf, total in alone.items():
        leaf.grad = total  # autograd would copy what somebody else still refers to
