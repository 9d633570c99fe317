"""Find where a backward can be cut in two: input gradients (I) first, weight gradients (W) later.

The stage before waits for the gradients of a stage's inputs, and nobody waits for those of its weights. For `x @ w`
followed by more layers, the autograd graph from the stage's outputs reaches the node of the product, and leaves it on
two edges: to `x` and to `w`. That node is the *branch node* of `w`: the path to the weight leaves the path to the
inputs there. An input-gradient backward keeps the gradient that arrives at each branch node. A weight-gradient backward
starts from those and goes to the weights alone, so no gradient is computed twice.

Three kinds of weights have no branch node, and get their gradient with the inputs: one with several users, one of a
function with a backward of the user's own, and one of an operator that computes all its gradients at once, as a batch
norm does. The last two would do their work twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

FUSED = ("BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm", "Rnn", "Lstm", "Gru", "Prelu", "Attention", "CppNode")
"""Parts of the names of autograd nodes whose kernels compute the gradients of inputs and weights together."""

BranchNodes = dict[Any, tuple[list[GradientEdge], list[Tensor]]]
"""Each branch node with the edges into it (one for each of its outputs that is used) and the weights to reach."""

Users = dict[Any, list[tuple[Any, int]]]
"""Who uses each autograd node: the nodes that hand it gradients, each with the number of the output that it used."""

WeightBackward = tuple[list[GradientEdge], list[Tensor], list[Tensor]]
"""The weight-gradient backward of one branch node: the edges to start from, the weights, the gradients that arrived."""


def find_branch_nodes(roots: Sequence[Tensor], trained: Iterable[Tensor]) -> tuple[BranchNodes, list[Tensor]]:
    """Return the branch nodes of the weights `trained` in the graph of `roots`, and the weights that have none.

    A weight that no root depends on is in neither.
    """
    users, node_of = _find_users(roots)
    # Weights that leave the stage as they are: their gradient arrives at no node of the stage.
    handed_on = {id(root) for root in roots if root.grad_fn is None}
    nodes: BranchNodes = {}
    without: list[Tensor] = []
    for weight in trained:
        if weight not in node_of and id(weight) not in handed_on:
            continue
        node = None if id(weight) in handed_on else _find_branch_node(node_of[weight], users)
        if node is None:
            without.append(weight)
        elif node in nodes:
            nodes[node][1].append(weight)
        else:
            numbers = sorted({number for _, number in users[node]})
            nodes[node] = [GradientEdge(node, number) for number in numbers], [weight]
    return nodes, without


def collect_weight_backwards(nodes: BranchNodes, gradients: Iterable[Tensor | None]) -> list[WeightBackward]:
    """Return the weight-gradient backwards, from the gradients at all edges of all nodes, in the nodes' order.

    A node at which no gradient arrived has none.
    """
    arrived = iter(gradients)
    found: list[WeightBackward] = []
    for edges, weights in nodes.values():
        known = [(edge, gradient) for edge in edges if (gradient := next(arrived)) is not None]
        if known:
            found.append(([edge for edge, _ in known], weights, [gradient for _, gradient in known]))
    return found


def _find_users(roots: Sequence[Tensor]) -> tuple[Users, dict[Tensor, Any]]:
    """Return the users of each autograd node that the roots depend on, and the node of each leaf among them.

    The user of a root's own node is None.
    """
    users: Users = defaultdict(list)
    node_of: dict[Tensor, Any] = {}
    inner = [root for root in roots if root.grad_fn is not None]
    for root in inner:
        users[root.grad_fn].append((None, root.output_nr))
    seen = {root.grad_fn for root in inner}
    stack: list[Any] = list(seen)
    while stack:
        node = stack.pop()
        # A leaf's node, AccumulateGrad, is the only kind that names its tensor.
        if hasattr(node, "variable"):
            node_of[node.variable] = node
        for above, number in node.next_functions:
            # None stands for an argument that wants no gradient.
            if above is None:
                continue
            users[above].append((node, number))
            if above not in seen:
                seen.add(above)
                stack.append(above)
    return users, node_of


def _find_branch_node(leaf: Any, users: Users) -> Any:
    """Return the branch node of a leaf's node: the first of its users, and theirs, that leads elsewhere too.

    Where the path ends before that, at a root or at a node that must run once, return the last node that leads to the
    leaf alone, and None if that is the leaf itself.
    """
    node = leaf
    while True:
        callers = {caller for caller, _ in users[node]}
        # Gradients from several users are summed at the node, so none of the users has the weight's whole gradient.
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
