"""A backward in two halves: the gradients of a stage's inputs at once, those of its weights when there is time.

The first half stops nowhere, skips the ways to weights that have a node to join at (`fxsplit.joins`), and keeps the
gradient that arrives at each such node; the second half starts there and goes to the weights alone. So no gradient is
computed twice. Other weights get theirs in the first half, as do those of stages whose modules have hooks.
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
    """Return the gradients of a stage's inputs, as `backward` does, and what is left to do for its weights.

    With `whole` nothing is left: a node that has hooks would run them in both halves.
    """
    roots = list_roots(saved, gradients)
    if not roots:
        return [None] * len(saved.inputs), [], []
    inputs = {i: v for i, v in enumerate(saved.inputs) if isinstance(v, Tensor) and v.requires_grad}
    late = [] if whole else [weight for weight in trained if all(weight is not leaf for leaf in saved.extra)]
    nodes, several = find_branch_nodes([value for value, _ in roots], late)
    several = list(trained) if whole else several
    edges = [edge for edges, _ in nodes.values() for edge in edges]
    leaves = list(dict.fromkeys([*inputs.values(), *several, *saved.extra]))
    ends: list[Any] = [*leaves, *edges]
    if not ends:
        return [None] * len(saved.inputs), [], []
    with mute(saved.extra):
        found = differentiate(
            [value for value, _ in roots], [gradient for _, gradient in roots], ends, retain_graph=bool(edges)
        )
    own = find_unshared(found)
    first, last = len(inputs), len(leaves)
    shares = make_shares(leaves[first:], found[first:last], own[first:last])
    of = dict(zip(leaves, found, strict=False))
    left = collect_weight_backwards(nodes, found[last:])
    return [of[inputs[i]] if i in inputs else None for i in range(len(saved.inputs))], shares, left


def compute_weight_gradients(left: list[WeightBackward], sums: Sums) -> None:
    """Do what is left: add the gradients of the weights to `sums`."""
    while left:
        edges, weights, gradients = left.pop()
        found = differentiate(edges, gradients, weights)
        sums.add(make_shares(weights, found, find_unshared(found)))
