"""Split a backward in two: input gradients (I) first, weight gradients (W) later.

The previous stage waits for the gradients of a stage's inputs, but nothing waits for the gradients of its weights. For
`x @ w` followed by more layers, the autograd graph looks like this:

    outputs -> ... -> product -> ... -> inputs      I: from the outputs to the inputs
                         |                             keeps the gradient that arrives at `product`
                         +-----> w                  W: from `product` to w, with the kept gradient

The product's node is the *branch node* of `w`: there, the path to the weight leaves the path to the inputs. No gradient
is computed twice.

Three kinds of weights have no branch node and get their gradient together with the inputs: weights with several users,
weights of a function with a user-defined backward, and weights of an operator that computes all its gradients at once,
such as batch norm. Splitting the last two would do their work twice. Cheap weight gradients, which cost less than the
overhead of a delay, are not split either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from fxsplit.torch_internals.autograd.graph_shape import GraphShape
from fxsplit.torch_internals.autograd.products import Product, differentiate_product, find_product
from fxsplit.torch_internals.autograd.sums import differentiate

FUSED = ("BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm", "Rnn", "Lstm", "Gru", "Prelu", "Attention", "CppNode")
"""Parts of the names of autograd nodes that compute the gradients of inputs and weights in one kernel."""

LEAST_PRODUCTS: Mapping[str, int] = defaultdict(lambda: 1 << 27, cpu=1 << 20)
"""The fewest multiplications, by device type, for which delaying a weight gradient pays off.

Delaying takes the host 15 us for a linear layer and 60 us for other layers. This many multiplications take about twice
that on one CPU thread, or on an accelerator that does 2e12 per second. The second figure is an estimate.
"""

MOST_SHAPES = 4
"""The most graph shapes cached per stage. A graph that always changes is searched every time."""


class Branch(NamedTuple):
    """A branch node, with the weights whose gradients can be left for later there.

    edges: the edges into the node, one for each of its outputs that is used.
    product: describes the product of a linear layer; None for other nodes.
    """

    edges: list[GradientEdge]
    weights: list[Tensor]
    product: Product | None


BranchNodes = dict[Any, Branch]
"""Branches by their node."""

Users = dict[Any, list[tuple[Any, int]]]
"""The users of each autograd node: the nodes that pass gradients to it, each with the index of the output used."""


class WeightBackward(NamedTuple):
    """The part of a backward that was left for later at one branch node.

    edges: where it starts. gradients: the gradients that arrived there.
    weights: the weights whose gradients it computes. product: as in `Branch`.
    """

    edges: list[GradientEdge]
    weights: list[Tensor]
    gradients: list[Tensor]
    product: Product | None = None

    def run(self, retain_graph: bool = False) -> Sequence[Tensor | None]:
        """Return the gradients of the weights. Call this under no_grad.

        `retain_graph`: keep the tensors that autograd saved.
        """
        if self.product is not None:
            found = differentiate_product(self.product, self.edges[0].node, self.gradients[0], self.weights)
            if found is not None:
                return found
        return differentiate(self.edges, self.gradients, self.weights, retain_graph)


def find_branch_nodes(
    roots: Sequence[Tensor], trained: Iterable[Tensor], small_too: bool = False
) -> tuple[BranchNodes, list[Tensor]]:
    """Return the branch nodes of the weights `trained` in the graph of `roots`, and the weights without a branch node.

    A weight on which no root depends is in neither result. A weight whose gradient is too cheap to delay has no branch
    node, unless `small_too`.
    """
    users, node_of = _find_users(roots)
    # Weights that the stage returns unchanged: their gradient arrives at no node of the stage.
    handed_on = {id(root) for root in roots if root.grad_fn is None}
    own: dict[Any, list[Tensor]] = defaultdict(list)
    without: list[Tensor] = []
    for weight in trained:
        if weight not in node_of and id(weight) not in handed_on:
            continue
        node = None if id(weight) in handed_on else _find_branch_node(node_of[weight], users)
        if node is None:
            without.append(weight)
        else:
            own[node].append(weight)
    nodes: BranchNodes = {}
    for node, weights in own.items():
        numbers = sorted({number for _, number in users[node]})
        if _is_small(node, numbers, weights) and not small_too:
            without += weights
        else:
            nodes[node] = Branch([GradientEdge(node, n) for n in numbers], weights, find_product(node, weights))
    return nodes, without


def _is_small(node: Any, numbers: Sequence[int], weights: Sequence[Tensor]) -> bool:
    """Return whether the gradients of a branch node's weights are too cheap to delay.

    numbers: the indices of the node's outputs that are used.
    """
    # The arriving gradient has one element per output element. Each takes part in as many products as the weight has
    # elements per output feature, which is the weight's first dimension.
    outputs = [node._input_metadata[number] for number in numbers]
    # The shape of a nested tensor does not give its number of elements.
    if any(output.is_nested_tensor for output in outputs):
        return False
    arriving: int = sum(math.prod(output.shape) for output in outputs)
    products = max(arriving * weight.numel() // max(1, weight.shape[0] if weight.ndim else 1) for weight in weights)
    return products < LEAST_PRODUCTS[weights[0].device.type]


class _Known(NamedTuple):
    """The branch nodes of all graphs of one shape, to reuse the result of a search.

    branches: for each branch node, its position among the nodes, its used outputs, its weights as indices, and its
        product.
    without: the indices of the weights without a branch node.
    """

    shape: GraphShape
    branches: list[tuple[int, list[int], list[int], Product | None]]
    without: list[int]


class BranchFinder:
    """Finds the branch nodes of a stage's autograd graph, at which a backward can leave weight gradients for later.

    The result for a graph is reused for every graph of the same shape.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []
        # The root shapes of graphs in which all weight gradients are too cheap to delay.
        self._idle: set[tuple[torch.Size, ...]] = set()

    def find(self, roots: Sequence[Tensor], trained: Sequence[Tensor]) -> tuple[BranchNodes, list[Tensor]]:
        """Return the same as `find_branch_nodes`, from a cache if the graph has a known shape.

        If all weight gradients were too cheap to delay for roots of these shapes, no branch nodes are returned.
        """
        # Delaying nothing is correct for every graph, so the shapes of the roots are enough here.
        shapes = tuple([root.shape for root in roots])
        if shapes in self._idle:
            return {}, list(trained)
        numbers = {id(weight): i for i, weight in enumerate(trained)}
        for known in self._known:
            nodes = known.shape.match(roots, numbers)
            if nodes is not None:
                found = {
                    nodes[i]: Branch([GradientEdge(nodes[i], n) for n in outputs], [trained[w] for w in own], product)
                    for i, outputs, own, product in known.branches
                }
                return found, [trained[w] for w in known.without]
        found, without = find_branch_nodes(roots, trained)
        few = without and not found and len(self._idle) < MOST_SHAPES
        if few and find_branch_nodes(roots, trained, small_too=True)[0]:
            self._idle.add(shapes)
            return found, without
        # Store positions and numbers only, so that the cache keeps neither the graph nor its tensors alive.
        positions: dict[Any, int] = {}
        shape = GraphShape(roots, numbers, positions)
        branches = [
            (positions[node], [edge.output_nr for edge in b.edges], [numbers[id(w)] for w in b.weights], b.product)
            for node, b in found.items()
        ]
        known = _Known(shape, branches, [numbers[id(weight)] for weight in without])
        self._known = [known, *self._known][:MOST_SHAPES]
        return found, without


def collect_weight_backwards(nodes: BranchNodes, gradients: Iterable[Tensor | None]) -> list[WeightBackward]:
    """Return the backwards that are left for later: one for each branch node, with the gradients that arrived.

    gradients: the gradients at all edges, in the order of the nodes. A node at which no gradient arrived is skipped.
    """
    arrived = iter(gradients)
    found: list[WeightBackward] = []
    for edges, weights, product in nodes.values():
        known = [(edge, gradient) for edge in edges if (gradient := next(arrived)) is not None]
        if known:
            found.append(WeightBackward([edge for edge, _ in known], weights, [g for _, g in known], product))
    return found


def _find_users(roots: Sequence[Tensor]) -> tuple[Users, dict[Tensor, Any]]:
    """Return the users of each autograd node on which the roots depend, and the node of each leaf.

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
        # AccumulateGrad, a leaf's node, is the only node type with a `variable`.
        if hasattr(node, "variable"):
            node_of[node.variable] = node
        for above, number in node.next_functions:
            # None stands for an argument without gradient.
            if above is None:
                continue
            users[above].append((node, number))
            if above not in seen:
                seen.add(above)
                stack.append(above)
    return users, node_of


def _find_branch_node(leaf: Any, users: Users) -> Any:
    """Return a leaf's branch node: walk from the leaf's node through its users to the first that also leads elsewhere.

    If the path first reaches a root or a node that must run once, return the last node that leads only to the leaf, or
    None if that is the leaf's own node.
    """
    node = leaf
    while True:
        callers = {caller for caller, _ in users[node]}
        # Gradients from several users are summed at this node, so no user has the weight's whole gradient.
        if len(callers) != 1:
            return None
        (caller,) = callers
        if caller is None or _must_run_once(caller):
            return None if node is leaf else node
        if any(above is not None and above is not node for above, _ in caller.next_functions):
            return caller
        node = caller


def _must_run_once(node: Any) -> bool:
    """Return whether a node must run once: a user-defined backward may not run twice, and a fused kernel should not."""
    return isinstance(node, BackwardCFunction) or any(kind in node.name() for kind in FUSED)
