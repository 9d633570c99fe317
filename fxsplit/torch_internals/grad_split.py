"""Joins: where, on the way back from a result, the way to a weight leaves the way to everything else.

The gradient of a weight can wait until the gradients of a stage's inputs are there: it is computed at an autograd node
of its own, for example a convolution's, from what arrives there. A weight with several users has no one such node, nor
has one of a function with a backward of the user's own, nor of an operator that computes all its gradients at once, as
a batch norm does: those would do their work twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

FUSED = ("BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm", "Rnn", "Lstm", "Gru", "Prelu", "Attention", "CppNode")
"""What is in the names of autograd nodes whose kernels compute the gradients of inputs and weights together."""

WeightBackward = tuple[list[GradientEdge], list[Tensor], list[Tensor]]
"""What is left of a backward at one node: the edges into it, the weights to go to, the gradients that arrived."""


def find_branch_nodes(
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
        join = _find_branch_node(leaf_of[weight], users)
        if join is None:
            several.append(weight)
        elif join in nodes:
            nodes[join][1].append(weight)
        else:
            numbers = sorted({number for _, number in users[join]})
            nodes[join] = [GradientEdge(join, number) for number in numbers], [weight]
    return nodes, several


def collect_weight_backwards(
    nodes: dict[Any, tuple[list[GradientEdge], list[Tensor]]], gradients: Iterable[Tensor | None]
) -> list[WeightBackward]:
    """Return what is left to do at nodes, from the gradients at all their edges; nothing where none arrived."""
    arrived = iter(gradients)
    found: list[WeightBackward] = []
    for edges, weights in nodes.values():
        known = [(edge, gradient) for edge in edges if (gradient := next(arrived)) is not None]
        if known:
            found.append(([edge for edge, _ in known], weights, [gradient for _, gradient in known]))
    return found


def _find_branch_node(leaf: Any, users: dict[Any, list[tuple[Any, int]]]) -> Any:
    """Return the node from which only `leaf` is left to reach, or the first that leads elsewhere too; None without."""
    node = leaf
    while True:
        callers = {caller for caller, _ in users[node]}
        if len(callers) != 1:
            return None
        (caller,) = callers
        if caller is None or _must_run_once(caller):
            return None if node is leaf else node
        if any(above is not None and above is not node for above, _ in caller.next_functions):
            return caller
        node = caller


def _must_run_once(node: Any) -> bool:
    """Return whether a node is to be run once: a user's own backward may not run twice, a fused kernel should not."""
    return isinstance(node, BackwardCFunction) or any(kind in node.name() for kind in FUSED)
