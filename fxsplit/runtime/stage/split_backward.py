"""Run a backward in two parts: input gradients (I) at once, weight gradients (W) when the worker has time.

Schedules such as ZB-H1 do so, since the stage before waits for the input gradients alone. The first part keeps the
gradient that arrives at each weight's branch node (see `torch_internals/grad_split.py`), and the second part goes from
there to the weights. Weights without a branch node get their gradients in the first part, and so do all weights of
stages whose modules have hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxsplit.runtime.stage.run import Saved, list_roots
from fxsplit.torch_internals.grad_leaves import mute
from fxsplit.torch_internals.grad_split import WeightBackward, collect_weight_backwards, find_branch_nodes
from fxsplit.torch_internals.grad_sums import Share, Sums, differentiate, find_unshared, make_shares


def compute_input_gradients(
    saved: Saved, gradients: Sequence[Tensor | None], trained: Sequence[Tensor], whole: bool = False
) -> tuple[list[Tensor | None], list[Share], list[WeightBackward]]:
    """Return the gradients of a stage's inputs, shares of the weights without a branch node, and what is left to do.

    With `whole` all shares are computed and nothing is left: a node that has hooks would run them in both parts.
    """
    roots, arrived = list_roots(saved, gradients)
    if not roots:
        return [None] * len(saved.inputs), [], []
    inputs = {i: v for i, v in enumerate(saved.inputs) if isinstance(v, Tensor) and v.requires_grad}
    # A weight that the loss depends on too gets a gradient from two places, one of them outside of the stage.
    candidates = [] if whole else [weight for weight in trained if all(weight is not leaf for leaf in saved.extra)]
    nodes, without = find_branch_nodes(roots, candidates)
    at_once = list(trained) if whole else without
    edges = [edge for edges, _ in nodes.values() for edge in edges]
    # Each leaf once: the loss may depend on a weight that has no branch node.
    leaves = list(dict.fromkeys([*inputs.values(), *at_once, *saved.extra]))
    ends: list[Any] = [*leaves, *edges]
    if not ends:
        return [None] * len(saved.inputs), [], []
    with mute(saved.extra):
        found = differentiate(roots, arrived, ends, retain_graph=bool(edges))
    unshared = find_unshared(found)
    first, last = len(inputs), len(leaves)
    shares = make_shares(leaves[first:], found[first:last], unshared[first:last])
    gradient_of = dict(zip(leaves, found, strict=False))
    left = collect_weight_backwards(nodes, found[last:])
    return [gradient_of[inputs[i]] if i in inputs else None for i in range(len(saved.inputs))], shares, left


def compute_weight_gradients(left: list[WeightBackward], sums: Sums) -> None:
    """Add the gradients of the weights to `sums`, and empty the list of what is left to do."""
    # Popped, so that the gradients that a branch node was waiting with are freed one after the other.
    while left:
        edges, weights, gradients = left.pop()
        found = differentiate(edges, gradients, weights)
        sums.add(make_shares(weights, found, find_unshared(found)))
