"""Working memory: what a stage needs while it runs, besides what it keeps of each microbatch.

Whatever is held at a moment depends on the node that runs then. While the forward of a node runs there are the values
that later nodes read and no backward keeps, and what the node allocates. While its backward runs there are the
gradients that have been computed and not yet been used, and what the node allocates. So a stage needs the most of its
nodes, and not their sum. Activations grow from node to node in the forward, and are freed in the backward, so less of
them is there with an early node than with a late one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fxsplit.ir.facts.costs import Costs, NodeCost

LOSS_COPIES = 1.0
"""What the backward of a loss allocates, in sizes of the model's outputs, besides the gradient that it returns.

No profile knows the loss. That of a cross entropy is the gradient of a logarithm for each output.
"""


LOSS_KEEPS = 1.0
"""What a loss keeps for its backward, in sizes of the model's outputs: these, or what a softmax makes of them."""


@dataclass(frozen=True)
class NodeRoom:
    """What must have room while a node runs, in bytes.

    near_bytes: beside all activations of the stage. far_bytes: beside those that the stage does not make, of all
    activations that are made up to this node, in the order of the graph; `prior_bytes` of them come before the node.
    """

    near_bytes: float
    far_bytes: float
    prior_bytes: float


@lru_cache(maxsize=8)  # facts do not change, and a graph is priced many times
def list_rooms(costs: Costs, *, splits: bool = False) -> dict[str, NodeRoom]:
    """Return what must have room while each node runs, by its name, in graph order.

    splits: whether backwards leave the gradients of weights for later, and free nothing until those are computed.
    """
    unkept, gradients = _sum_unkept(costs), _sum_gradients(costs)
    rooms, kept = {}, 0.0
    for i, node in enumerate(costs.nodes):
        prior = kept
        kept += node.kept_bytes
        near = (
            0.0
            if runs_nothing(node)
            else max(_need_forward(node) + unkept[i], _need_backward(node, splits=splits) + gradients[i])
        )
        rooms[node.name] = NodeRoom(near, kept + near, prior)
    return rooms


def find_working_bytes(
    costs: Costs, names: Collection[str], earlier: Collection[str], given_bytes: float, *, splits: bool
) -> float:
    """Return what a stage of the nodes `names` needs beside its activations, behind stages of the nodes `earlier`.

    given_bytes: the activations that the stage hands on, and so has until its backward ends.

    Two bounds hold, and the smaller one counts. Beside all activations of the stage the node counts that needs most.
    Or each node counts beside the activations up to it, less those that earlier stages are sure to have: those up to
    the first node that is not in them. That is exact where stages follow the order of the graph, but for activations
    that are handed on, of which all count.
    """
    if not names or not costs.weighed:
        return 0.0
    rooms = list_rooms(costs, splits=splits)
    near = max(rooms[name].near_bytes for name in names)
    if splits:
        return near
    kept = sum(costs.by_name[name].kept_bytes for name in names)
    far = max(rooms[name].far_bytes for name in names) - find_settled_bytes(costs, earlier) - (kept - given_bytes)
    return min(near, far)


def find_settled_bytes(costs: Costs, names: Collection[str]) -> float:
    """Return the activations of the nodes before the first, in graph order, that is not among `names`."""
    inside = set(names)
    settled = 0.0
    for node in costs.nodes:
        if node.name not in inside:
            break
        settled += node.kept_bytes
    return settled


def runs_nothing(node: NodeCost) -> bool:
    """Return whether a node only fetches an attribute."""
    return node.op.startswith("get_attr")


def is_part_of_several(node: NodeCost) -> bool:
    """Return whether a node only fetches one of several values that another one has made."""
    return node.op == "call_function:getitem" and bool(node.inputs)


def _need_forward(node: NodeCost) -> float:
    """Return what a node's forward allocates at most, less what is kept of it, which is an activation of the stage."""
    return max((node.forward_peak_bytes or 0.0) - node.kept_bytes, 0.0)


def _need_backward(node: NodeCost, *, splits: bool) -> float:
    """Return what a node's backward allocates at most."""
    return max(node.backward_peak_bytes, node.halved_peak_bytes if splits else 0.0)


def _sum_unkept(costs: Costs) -> list[float]:
    """Return, for each node, the values that are there while its forward runs and that no backward keeps, in bytes."""
    position = {node.name: i for i, node in enumerate(costs.nodes)}
    spans = []
    for name, _, _, readers, is_output in costs.values:
        if name in position:
            last = len(position) if is_output else max([position[r] for r in readers], default=-1)
            spans.append((position[name] + 1, last, costs.by_name[name].unkept_bytes))
    return _add_up(spans, len(position))


def _sum_gradients(costs: Costs) -> list[float]:
    """Return, for each node, the gradients that are there while its backward runs, in bytes.

    A value's gradient is there from the backward of the last node that reads it to that of the node that made it.
    Those that a stage is given, it holds throughout its backward, and they are not among these.
    """
    position = {node.name: i for i, node in enumerate(costs.nodes)}
    spans = []
    for name, _, gradient_bytes, readers, _ in costs.values:
        # The gradient of a weight that one node reads goes to its sum at once.
        if readers and not (name in position and runs_nothing(costs.by_name[name]) and len(readers) == 1):
            spans.append((_find_maker(costs, name, position), max(position[r] for r in readers) - 1, gradient_bytes))
    return _add_up(spans, len(position))


def _find_maker(costs: Costs, name: str, position: Mapping[str, int]) -> int:
    """Return the place of the node that made a value; 0 for what the model is given.

    What is one of several outputs of a node was made by that node.
    """
    node = costs.by_name.get(name)
    if node is not None and is_part_of_several(node):
        return position.get(node.inputs[0], 0)
    return position.get(name, 0)


def _add_up(spans: Iterable[tuple[int, int, float]], count: int) -> list[float]:
    """Return the sum at each of `count` places of the figures whose span (first, last, figure) holds the place."""
    change = [0.0] * (count + 2)
    for first, last, figure in spans:
        if first <= last:
            change[first] += figure
            change[min(last, count) + 1] -= figure
    found, now = [], 0.0
    for i in range(count):
        now += change[i]
        found.append(now)
    return found
