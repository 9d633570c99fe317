"""Fold: the graph of a plan as a few boxes for each stage, with one box for the nodes of a module.

A stage begins as one box. The box that takes longest is divided into the parts of its module, again and again, until
the stage has as many boxes as wanted. If there are too many parts, neighbours share a box:

    [ whole stage ]  ->  [ embed ] [ layers ]  ->  [ embed ] [ layers.0 .. 5 ] [ layers.6 .. 11 ]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxsplit.ir.facts.costs.costs import Costs, NodeCost
from fxsplit.ir.facts.plan import Plan

OUTSIDE = "(forward)"
"""The box of nodes outside of any submodule, which the model's own forward() calls."""


@dataclass(frozen=True)
class Fold:
    """The nodes of one box, in the order of the graph.

    `name` is for people. `path` is the path of the box's module; None for a box that is not one module, and so cannot
    be divided.
    """

    stage: int
    name: str
    path: str | None
    nodes: tuple[NodeCost, ...] = field(repr=False)

    @cached_property
    def ms(self) -> float:
        """The time of the nodes for one microbatch, forward and backward, on the profiled device."""
        return sum(n.forward_ms + n.backward_ms for n in self.nodes)


@dataclass(frozen=True)
class Arc:
    """The values from the nodes of box `source` to the nodes of box `target`: their names, and the sum of their bytes.

    `source` and `target` are positions in `FoldedGraph.folds`.
    """

    source: int
    target: int
    names: tuple[str, ...]
    forward_bytes: float


@dataclass(frozen=True)
class FoldedGraph:
    """Boxes, stage by stage and in the order of the graph, and the arcs between them."""

    folds: tuple[Fold, ...]
    arcs: tuple[Arc, ...]

    def of_stage(self, stage: int) -> list[int]:
        """Return the numbers of the boxes of a stage."""
        return [i for i, fold in enumerate(self.folds) if fold.stage == stage]


def fold_graph(plan: Plan, costs: Costs, most: int = 10) -> FoldedGraph:
    """Return the graph of a plan with at most `most` boxes in each stage."""
    position = {node.name: i for i, node in enumerate(costs.nodes)}
    folds: list[Fold] = []
    for number, stage in enumerate(plan.stages):
        nodes = [costs.by_name[name] for name in sorted(stage.nodes, key=position.__getitem__)]
        folds += fold_nodes(number, nodes, most)
    folds = _name_parts(folds, plan, costs)
    box_of = {node.name: i for i, fold in enumerate(folds) for node in fold.nodes}
    joined: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for name, there, _, readers, _ in costs.values:
        for reader in readers:
            if name in box_of and box_of[name] != box_of[reader]:
                joined[box_of[name], box_of[reader]][name] = there
    arcs = [Arc(a, b, tuple(values), sum(values.values())) for (a, b), values in sorted(joined.items())]
    return FoldedGraph(tuple(folds), tuple(arcs))


def _name_parts(folds: Sequence[Fold], plan: Plan, costs: Costs) -> list[Fold]:
    """Return the boxes. If several stages share a module, its boxes get the name of their slowest node.

    Otherwise all of these boxes would have one name: the layers of an LSTM are nodes of one module.
    """
    stage_of, stages = plan.stage_of(), defaultdict[str, set[int]](set)
    for node in costs.nodes:
        stages[node.owner].add(stage_of[node.name])
    found = []
    for fold in folds:
        longest = max(fold.nodes, key=lambda n: (n.forward_ms + n.backward_ms, n.name))
        shared = fold.path and longest.owner == fold.path and len(stages[fold.path]) > 1
        found.append(Fold(fold.stage, longest.place, fold.path, fold.nodes) if shared else fold)
    return found


def fold_nodes(stage: int, nodes: Sequence[NodeCost], most: int) -> list[Fold]:
    """Return the boxes of the nodes of a stage, in the order of the graph."""
    if not nodes:
        return []
    boxes, whole = [Fold(stage, "", "", tuple(nodes))], set[str]()
    while True:
        free = most - len(boxes) + 1
        inside = [box for box in boxes if box.path is not None and box.path not in whole]
        # Ties are broken by name, so that the picture is the same each time.
        largest = max(inside, key=lambda box: (box.ms, len(box.nodes), box.name), default=None)
        if largest is None or largest.path is None:
            break
        parts = _divide(largest, free, most)
        if len(parts) > 1 or (parts and parts[0].path != largest.path and parts[0].path is not None):
            boxes = [box for box in boxes if box is not largest] + parts
        else:
            whole.add(largest.path)
    order = {node.name: i for i, node in enumerate(nodes)}
    return _join_small(sorted(boxes, key=lambda box: order[box.nodes[0].name]))


def _join_small(boxes: Sequence[Fold]) -> list[Fold]:
    """Return the boxes, with neighbours joined if none of them is a module and all take next to no time."""
    least = SMALL * sum(box.ms for box in boxes)
    found: list[Fold] = []
    for box in boxes:
        before = found[-1] if found else None
        if before is None or before.path is not None or box.path is not None or max(before.ms, box.ms) > least:
            found.append(box)
            continue
        ends = before.name.partition(" .. ")[0], box.name.rpartition(" .. ")[2]
        found[-1] = Fold(box.stage, " .. ".join(ends), None, (*before.nodes, *box.nodes))
    return found


def list_parts(path: str, nodes: Sequence[NodeCost]) -> dict[str, list[NodeCost]]:
    """Return the nodes in each part of the module `path`, by the path of the part, in the order of the graph.

    A node in no submodule of it is a part of its own, with the node's place as path. If there are more than FEW such
    nodes, they are one part together, OUTSIDE.
    """
    own = [node for node in nodes if node.owner == path]
    parts: dict[str, list[NodeCost]] = defaultdict(list)
    depth = path.count(".") + 2 if path else 1
    for node in nodes:
        part = ".".join(node.owner.split(".")[:depth])
        # A run of such nodes lies between two submodules. All of them together would span the whole stage.
        parts[(node.place if len(own) <= FEW else OUTSIDE) if node.owner == path else part].append(node)
    return parts


FEW = 4
"""The most nodes of a module's own forward() that have boxes of their own."""
SMALL = 0.02
"""The share of a stage's time below which a box is small."""


def _divide(box: Fold, free: int, most: int) -> list[Fold]:
    """Return the parts of a box, at most `free`; the box itself if it has no parts, or too little room is left."""
    path = box.path or ""
    parts = list_parts(path, box.nodes)
    if len(parts) == 1 and next(iter(parts)) in (OUTSIDE, path):
        if path or len(box.nodes) < 2:
            return [box]
        parts = {_name_node(node): [node] for node in box.nodes}
    if len(parts) > free:
        # A few boxes of many parts each say less than the module itself.
        return [box] if free < max(2, most // 2) and path else _join_runs(box, parts, free)
    return [_make_part(box, name, nodes) for name, nodes in parts.items()]


def _make_part(box: Fold, name: str, nodes: Sequence[NodeCost]) -> Fold:
    inside = any(node.owner == name for node in nodes) or all(node.owner.startswith(f"{name}.") for node in nodes)
    shown = f"{box.path}.{OUTSIDE}" if name == OUTSIDE and box.path else name
    return Fold(box.stage, shown, name if inside and name != OUTSIDE else None, tuple(nodes))


def _join_runs(box: Fold, parts: dict[str, list[NodeCost]], most: int) -> list[Fold]:
    """Return the parts of a box in at most `most` runs, each of about the same time."""
    total = box.ms / most
    runs: list[list[str]] = [[]]
    taken = 0.0
    for left, (name, nodes) in zip(range(len(parts), 0, -1), parts.items(), strict=True):
        if runs[-1] and len(runs) < most and (taken >= total * len(runs) or left <= most - len(runs)):
            runs.append([])
        runs[-1].append(name)
        taken += sum(n.forward_ms + n.backward_ms for n in nodes)
    found = []
    for run in runs:
        if len(run) == 1:
            found.append(_make_part(box, run[0], parts[run[0]]))
            continue
        held = tuple(node for name in run for node in parts[name])
        # What both names begin with is said once.
        shared = box.path and all(name.startswith(f"{box.path}.") for name in (run[0], run[-1]))
        last = run[-1][len(box.path) + 1 :] if shared and box.path else run[-1]
        found.append(Fold(box.stage, f"{run[0]} .. {last}", None, held))
    return found


def _name_node(node: NodeCost) -> str:
    """Return the place of a node in the model; for a node of another tool, its number and its operator."""
    return f"{node.name} {node.op}" if is_numbered(node) else node.place


def is_numbered(node: NodeCost) -> bool:
    """Return whether a node comes from a profile of another tool, which numbers nodes: its operator is its name."""
    return not node.signature and ":" not in node.op and bool(node.op) and node.op != node.name
