"""A backward in two halves: the gradients of a stage's inputs at once, those of its weights when there is time.

The gradient of a weight is computed at the autograd node where the way to the weight joins the way to everything else,
for example a convolution's. The first half stops nowhere, skips the ways to such weights, and keeps the gradient that
arrives at each such node; the second half starts there and goes to the weights alone. So no gradient is computed twice.
A weight with several users has no one such node, and gets its gradient in the first half, as do weights of functions
with a backward of the user's own, and of stages whose modules have hooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from fxsplit.leaves import muted
from fxsplit.runtime.execute import Saved, roots_of
from fxsplit.runtime.gradients import Share, Sums, differentiated, ours_alone, shares_of


@dataclass
class Rest:
    """What is left of a backward: for each node at which weights join, the gradients that arrive there."""

    parts: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = field(default_factory=list)


def backward_inputs(
    saved: Saved, gradients: Sequence[Tensor | None], trained: Sequence[Tensor], whole: bool = False
) -> tuple[list[Tensor | None], list[Share], Rest]:
    """Return the gradients of a stage's inputs, as `backward` does, and what is left to do for its weights.

    With `whole` nothing is left: a node that has hooks would run them in both halves.
    """
    roots = roots_of(saved, gradients)
    if not roots:
        return [None] * len(saved.inputs), [], Rest()
    inputs = {i: v for i, v in enumerate(saved.inputs) if isinstance(v, Tensor) and v.requires_grad}
    late = [] if whole else [weight for weight in trained if all(weight is not leaf for leaf in saved.extra)]
    nodes, several = _joins([value for value, _ in roots], late)
    several = list(trained) if whole else several
    edges = [edge for edges, _ in nodes.values() for edge in edges]
    leaves = list(dict.fromkeys([*inputs.values(), *several, *saved.extra]))
    ends: list[Any] = [*leaves, *edges]
    if not ends:
        return [None] * len(saved.inputs), [], Rest()
    with muted(saved.extra):
        found = differentiated(
            [value for value, _ in roots], [gradient for _, gradient in roots], ends, again=bool(edges)
        )
    own = ours_alone(found)
    first, last = len(inputs), len(leaves)
    shares = shares_of(leaves[first:], found[first:last], own[first:last])
    of = dict(zip(leaves, found, strict=False))
    arrived = iter(found[last:])
    rest = Rest()
    for at, weights in nodes.values():
        known = [(edge, gradient) for edge in at if (gradient := next(arrived)) is not None]
        if known:
            rest.parts.append(([edge for edge, _ in known], weights, [gradient for _, gradient in known]))
    return [of[inputs[i]] if i in inputs else None for i in range(len(saved.inputs))], shares, rest


def backward_weights(rest: Rest, sums: Sums) -> None:
    """Do what is left: add the gradients of the weights to `sums`."""
    while rest.parts:
        edges, weights, gradients = rest.parts.pop()
        found = differentiated(edges, gradients, weights)
        sums.add(shares_of(weights, found, ours_alone(found)))


def _joins(
    roots: Sequence[Tensor], trained: Iterable[Tensor]
) -> tuple[dict[Any, tuple[list[GradientEdge], list[Tensor]]], list[Tensor]]:
    """Return the nodes at which weights join, each with the edges into it and its weights, and weights without one."""
    users: dict[Any, list[tuple[Any, int]]] = defaultdict(list)  # node -> who calls it, for which of its outputs
    leaf_of: dict[Tensor, Any] = {}
    inner = [root for root in roots if root.grad_fn is not None]
    handed_on = {id(root) for root in roots if root.grad_fn is None}  # weights that leave the stage as they are
    seen = {root.grad_fn for root in inner}
    for root in inner:
        users[root.grad_fn].append((None, root.output_nr))
    stack: list[Any] = list(seen)
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            leaf_of[node.variable] = node
        for above, number in node.next_functions:
            if above is None:
                continue
            users[above].append((node, number))
            if above not in seen:
                seen.add(above)
                stack.append(above)
    nodes: dict[Any, tuple[list[GradientEdge], list[Tensor]]] = {}
    several: list[Tensor] = []
    for weight in trained:
        if id(weight) in handed_on:
            several.append(weight)
            continue
        if weight not in leaf_of:
            continue
        join = _join(leaf_of[weight], users)
        if join is None or isinstance(join, BackwardCFunction):  # a user's own backward may not be run twice
            several.append(weight)
        elif join in nodes:
            nodes[join][1].append(weight)
        else:
            numbers = sorted({number for _, number in users[join]})
            nodes[join] = [GradientEdge(join, number) for number in numbers], [weight]
    return nodes, several


def _join(leaf: Any, users: dict[Any, list[tuple[Any, int]]]) -> Any:
    """Return the first node on the only way from the roots to `leaf` that leads elsewhere too; None without one."""
    node = leaf
    while True:
        callers = {caller for caller, _ in users[node]}
        if len(callers) != 1:
            return None
        (caller,) = callers
        if caller is None:
            return None
        if any(above is not None and above is not node for above, _ in caller.next_functions):
            return caller
        node = caller
