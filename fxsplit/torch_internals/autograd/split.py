"""Find where a backward can be cut in two: input gradients (I) first, weight gradients (W) later.

The stage before waits for the gradients of a stage's inputs, and nobody waits for those of its weights. For `x @ w`
followed by more layers, the autograd graph from the stage's outputs reaches the node of the product, and leaves it on
two edges: to `x` and to `w`. That node is the *branch node* of `w`: the path to the weight leaves the path to the
inputs there. An input-gradient backward keeps the gradient that arrives at each branch node. A weight-gradient backward
starts from those and goes to the weights alone, so no gradient is computed twice.

Three kinds of weights have no branch node, and get their gradient with the inputs: one with several users, one of a
function with a backward of the user's own, and one of an operator that computes all its gradients at once, as a batch
norm does. The last two would do their work twice. Weights whose gradient takes less than it takes the host to put it
off get theirs with the inputs too.
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
"""Parts of the names of autograd nodes whose kernels compute the gradients of inputs and weights together."""

LEAST_PRODUCTS: Mapping[str, int] = defaultdict(lambda: 1 << 27, cpu=1 << 20)
"""So many multiplications a weight gradient takes, by the type of its device, for it to be worth to put it off.

To put one off takes the host 15 us for a linear layer, and 60 us for others. The multiplications take about twice that,
on one thread of a CPU, and on an accelerator that does 2e12 in a second. The second figure is an estimate.
"""

MOST_SHAPES = 4
"""So many shapes of a stage's graph are kept; a graph that is another one every time is searched every time."""


class Branch(NamedTuple):
    """What is known of a branch node: the edges into it, one for each of its outputs that is used, and its weights.

    `product` says how it is the product of a linear layer, None where it is another node.
    """

    edges: list[GradientEdge]
    weights: list[Tensor]
    product: Product | None


BranchNodes = dict[Any, Branch]
"""Each branch node with what is known of it."""

Users = dict[Any, list[tuple[Any, int]]]
"""Who uses each autograd node: the nodes that hand it gradients, each with the number of the output that it used."""


class WeightBackward(NamedTuple):
    """The weight-gradient backward of one branch node: the edges to start from, the weights, what arrived there."""

    edges: list[GradientEdge]
    weights: list[Tensor]
    gradients: list[Tensor]
    product: Product | None = None

    def run(self, retain_graph: bool = False) -> Sequence[Tensor | None]:
        """Return the gradients of the weights, under no_grad; with `retain_graph` the graph keeps what it saved."""
        if self.product is not None:
            found = differentiate_product(self.product, self.edges[0].node, self.gradients[0], self.weights)
            if found is not None:
                return found
        return differentiate(self.edges, self.gradients, self.weights, retain_graph)


def find_branch_nodes(
    roots: Sequence[Tensor], trained: Iterable[Tensor], small_too: bool = False
) -> tuple[BranchNodes, list[Tensor]]:
    """Return the branch nodes of the weights `trained` in the graph of `roots`, and the weights that have none.

    A weight that no root depends on is in neither. One whose gradient is not worth to be put off
    has none, unless `small_too`.
    """
    users, node_of = _find_users(roots)
    # Weights that leave the stage as they are: their gradient arrives at no node of the stage.
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
    """Return whether the gradients of a branch node's weights take too little work to be put off.

    `numbers` are those of the node's outputs that are used.
    """
    # What arrives has an element for each output of a layer, and each one is multiplied with all that made it: those
    # are the elements of a weight for one of its outputs, which are its first dimension.
    outputs = [node._input_metadata[number] for number in numbers]
    # Nested tensors have no shape that says how many elements they have.
    if any(output.is_nested_tensor for output in outputs):
        return False
    arriving: int = sum(math.prod(output.shape) for output in outputs)
    products = max(arriving * weight.numel() // max(1, weight.shape[0] if weight.ndim else 1) for weight in weights)
    return products < LEAST_PRODUCTS[weights[0].device.type]


class _Known(NamedTuple):
    """What was found in graphs of one shape: nodes by position, and weights by their number among those trained."""

    shape: GraphShape
    branches: list[tuple[int, list[int], list[int], Product | None]]
    without: list[int]


class BranchFinder:
    """Finds the branch nodes of one stage. What it found for a graph serves every graph of the same shape."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        # The shapes of the roots of graphs whose weights are all too small for their gradients to be put off.
        self._idle: set[tuple[torch.Size, ...]] = set()

    def find(self, roots: Sequence[Tensor], trained: Sequence[Tensor]) -> tuple[BranchNodes, list[Tensor]]:
        """Return what `find_branch_nodes` returns; no branch nodes where those of such roots were all too small."""
        # To put nothing off is right for every graph, so that small ones need not be known again.
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
        # Kept by positions and numbers: what is kept of a graph must keep neither the graph nor its tensors.
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
    """Return the weight-gradient backwards, from the gradients at all edges of all nodes, in the nodes' order.

    A node at which no gradient arrived has none.
    """
    arrived = iter(gradients)
    found: list[WeightBackward] = []
    for edges, weights, product in nodes.values():
        known = [(edge, gradient) for edge in edges if (gradient := next(arrived)) is not None]
        if known:
            found.append(WeightBackward([edge for edge, _ in known], weights, [g for _, g in known], product))
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
