"""Keep gradients of zero at zero through a division by a count of zero, without reading the values on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

Gradients = tuple[Tensor | None, ...]


def keep_zeros(numbers: Sequence[Tensor]) -> None:
    """Keep gradients of zero at zero while they pass through scalars of the graph, even if these were divided by zero.

    Otherwise, a scalar that was divided by a count of zero turns its gradient 0 into 0 / 0, which is NaN. The scalars
    from which it was computed are treated the same. This holds only for the next backward.
    numbers: the tensors at which the backward starts. A tensor with more than one element is ignored.
    """
    for number in numbers:
        if number.grad_fn is not None and number.numel() == 1:
            _watch(number.grad_fn)


def _watch(node: Node) -> None:
    """Make `_hand_on` check the gradients that a node of autograd's graph passes on."""
    # Bind the next nodes, not the node itself, which would keep itself and its activations alive.
    below = [next_node for next_node, _ in node.next_functions]
    hook: Callable[[Any, Any], Any] = partial(_hand_on, below)
    node.register_hook(hook)


def _hand_on(below: Sequence[Node | None], made: Gradients, given: Gradients) -> Gradients | None:
    """Return the gradients that a node passes on (`made`), or zeros if the gradient that it was given is zero.

    below: the nodes that get the gradients.
    """
    (gradient,) = given if len(given) == 1 else (None,)
    if gradient is None or gradient.numel() != 1:
        return None
    counts = gradient.reshape(()) != 0
    for node, found in zip(below, made, strict=False):
        # A leaf has no further nodes. Only now is it known which nodes have scalars.
        if node is not None and found is not None and found.numel() == 1 and node.next_functions:
            _watch(node)
    return tuple(None if found is None else found.where(counts, 0) for found in made)
