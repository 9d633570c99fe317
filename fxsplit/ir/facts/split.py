"""Splits that the user states: which nodes are in which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.pins import find_nodes, suggest_names
from fxsplit.system.figures import format_count, show


@dataclass(frozen=True)
class CutBefore:
    """A split in which a stage begins before each of these submodules or nodes, in the order of the graph."""

    names: tuple[str, ...]


Split: TypeAlias = "Mapping[str, int] | Sequence[Sequence[str]] | CutBefore"
"""The stage of each submodule or node by name, a list of names for each stage, or the places of cuts."""


def cut_before(*names: str) -> CutBefore:
    """Return the split in which a stage begins before each of these submodules or nodes.

    Raises PlanError without names.
    """
    if not names:
        raise PlanError("cut_before() names no place: give submodules or nodes, such as cut_before('layer3')")
    return CutBefore(names)


def find_split(costs: Costs, split: Split, n_devices: int) -> list[list[str]]:
    """Return the nodes of each stage, in the order of the graph.

    A node that the split does not name is in the stage of the latest of its inputs, or of the nodes that it must stay
    together with. Raises PlanError for unknown names, for a name in two stages, for more stages than devices, and for a
    stage without nodes.
    """
    if not costs.nodes:
        raise PlanError("a graph without nodes has no stages")
    named = _find_stages(costs, split)
    stage_of = _count_cuts(costs, split) if isinstance(split, CutBefore) else spread_split(costs, named)
    listed = 0 if isinstance(split, (CutBefore, Mapping)) else len(split)
    count = max([listed, *(stage + 1 for stage in stage_of.values())])
    if count > n_devices:
        raise PlanError(f"the split has {format_count(count, 'stage')} for {format_count(n_devices, 'device')}")
    parts: list[list[str]] = [[] for _ in range(count)]
    for node in costs.nodes:
        parts[stage_of[node.name]].append(node.name)
    empty = next((number for number, names in enumerate(parts) if not names), None)
    if empty is not None:
        raise PlanError(f"stage {empty} of the split has no nodes: number the stages from 0, without gaps")
    return parts


def _find_stages(costs: Costs, split: Split) -> dict[str, int]:
    """Return the stage of each node that the split names. Raises PlanError for a wrong split."""
    several = (list, tuple, set, frozenset)
    lists = isinstance(split, several) and all(isinstance(names, several) for names in split)
    if not (lists or isinstance(split, (CutBefore, Mapping))):
        raise PlanError(
            f"a split of {show(split)}: give the stage of each submodule or node, a list of names for each stage, or "
            "fxsplit.cut_before('layer3')"
        )
    if isinstance(split, CutBefore):
        said = [(name, i + 1) for i, name in enumerate(split.names)]
    elif isinstance(split, Mapping):
        said = list(split.items())
    else:
        said = [(name, i) for i, names in enumerate(split) for name in names]
    found: dict[str, int] = {}
    for name, stage in said:
        if not isinstance(name, str) or type(stage) is not int or stage < 0:
            raise PlanError(
                f"{show(name)}: {show(stage)} in a split: give the name of a node, and the number of a stage"
            )
        nodes = find_nodes(costs, name)
        if not nodes:
            raise PlanError(f"cannot split at {name!r}: {suggest_names(costs, name)}")
        for node in nodes:
            if found.setdefault(node, stage) != stage and not isinstance(split, CutBefore):
                raise PlanError(f"node {node!r} is in stage {found[node]} and in stage {stage} of the split: keep one")
    return found


def _count_cuts(costs: Costs, split: CutBefore) -> dict[str, int]:
    """Return, for each node, the number of cuts before it in the order of the graph."""
    first = {find_nodes(costs, name)[0] for name in split.names}
    if costs.nodes and costs.nodes[0].name in first:
        raise PlanError(f"no stage can end before {costs.nodes[0].place!r}, which is the first node of the graph")
    stage_of, passed = {}, 0
    for node in costs.nodes:
        passed += node.name in first
        stage_of[node.name] = passed
    return stage_of


def spread_split(costs: Costs, named: Mapping[str, int]) -> dict[str, int]:
    """Return the stage of every node. A node without a named stage is in the latest stage of its inputs or companions.

    Companions are nodes that must stay together with the node.
    """
    companions = {name: names for names in costs.together for name in names}
    stage_of: dict[str, int] = {}
    for node in costs.nodes:
        others = [named.get(name, stage_of.get(name, 0)) for name in companions.get(node.name, ())]
        inputs = [stage_of[name] for name in node.inputs if name in stage_of]
        stage_of[node.name] = named.get(node.name, max([*inputs, *others], default=0))
    return stage_of
