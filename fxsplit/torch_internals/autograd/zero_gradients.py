"""Zero gradients that stay zero where a number was divided by zero: the host need not know of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

Gradients = tuple[Tensor | None, ...]


def keep_zeros(numbers: Sequence[Tensor]) -> None:
    """Let the gradient that numbers hand on be zero where their own is, also through a division by zero.

    Numbers are tensors of one element; others are left alone. A number that was divided by a count of zero would turn
    the gradient 0 into 0 / 0. What lies below it, as long as it is numbers, is treated alike. One backward is meant:
    the one that comes next.
    """
    for number in numbers:
        if number.grad_fn is not None and number.numel() == 1:
            _watch(number.grad_fn)


def _watch(node: Node) -> None:
    """Have `_hand_on` look at what a node of autograd's graph makes of its gradient."""
    # Not the node itself: it would keep itself alive, and with it the activations.
    below = [next_node for next_node, _ in node.next_functions]
    hook: Callable[[Any, Any], Any] = partial(_hand_on, below)
    node.register_hook(hook)


def _hand_on(below: Sequence[Node | None], made: Gradients, given: Gradients) -> Gradients | None:
    """Return what a node hands on, `made` of the gradient that it was `given`: zeros where that is zero."""
    (gradient,) = given if len(given) == 1 else (None,)
    if gradient is None or gradient.numel() != 1:
        return None
    counts = gradient.reshape(()) != 0
    for node, found in zip(below, made, strict=False):
        # Of a leaf there is nothing below. What is known by now alone tells which nodes have numbers.
        if node is not None and found is not None and found.numel() == 1 and node.next_functions:
            _watch(node)
    return tuple(None if found is None else found.where(counts, 0) for found in made)
