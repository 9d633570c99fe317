"""Gradients are summed over microbatches beside `.grad`, so that a step changes it once, at its end, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxsplit.leaves import gradient_hooks


class Sums:
    """The gradients of leaves, summed over the microbatches of one job: one worker adds, the caller reads at the end.

    Not `.grad` itself: a worker that the caller has given up on (Ctrl-C) may still be in a backward.
    """

    def __init__(self) -> None:
        self.totals: dict[Tensor, Tensor] = {}
        self._own: set[Tensor] = set()

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add one gradient; the first is only referred to, since autograd may have given it to others too."""
        total = self.totals.get(leaf)
        if total is None:
            self.totals[leaf] = gradient
        elif leaf in self._own and not total.is_sparse:
            total.add_(gradient)
        else:
            self.totals[leaf] = gradient + total if total.is_sparse else total + gradient
            self._own.add(leaf)

    def owns(self, leaf: Tensor) -> bool:
        """Return whether the sum is memory that nobody else refers to."""
        return leaf in self._own


def merged(parts: Sequence[Sums]) -> Sums:
    """Return one sum of all stages'; a loss may depend on parameters of any of them."""
    whole, *others = parts
    for part in others:
        for leaf, total in part.totals.items():
            if leaf in whole.totals:
                whole.add(leaf, total)
            else:
                whole.totals[leaf] = total
                whole._own |= part._own & {leaf}
    return whole


def accumulate(sums: Sums) -> None:
    """Add sums to `.grad` as autograd would, with the hooks there are."""
    alone = [leaf for leaf in sums.totals if leaf.grad is None and sums.owns(leaf) and not any(gradient_hooks(leaf))]
    watched = [leaf for leaf in sums.totals if leaf not in set(alone)]
    if watched:  # first, since a hook may raise
        torch.autograd.backward(watched, [sums.totals[leaf] for leaf in watched])
    for leaf in alone:
        leaf.grad = sums.totals[leaf]  # autograd would copy what somebody else still refers to
