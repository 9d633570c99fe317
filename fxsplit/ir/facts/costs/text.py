"""Show costs as tables. (costs.py imports this file, so this file does not import it.)"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from fxsplit.system.figures import format_bytes, format_count
from fxsplit.system.shown import Parts, Table

FEW = 40
"""Up to this number of nodes, a table shows each node. If there are more, it shows the largest modules."""
LARGEST = 20
"""The number of modules shown, the largest first."""


def list_parts(costs: Any, *, whole: bool) -> Parts:
    """Return a table of the nodes, or of the largest modules if there are many nodes and `whole` is false.

    After the table come lines about constraints on cuts and order, and about the measurement.
    """
    # A CPU launches nothing, and needs no column for it.
    launched = bool(costs.launch_ms)
    few = whole or len(costs.nodes) <= FEW
    # Two nodes may have one place, such as two calls of one module.
    listed = [(n.place, [n]) for n in costs.nodes] if few else list(sum_by_module(costs.nodes, LARGEST).items())
    heads = ["node" if few else "module", *[">nodes"] * (not few), ">fwd ms", ">bwd ms", *[">launch ms"] * launched]
    rows = []
    for name, nodes in listed:
        times = [sum(n.forward_ms for n in nodes), sum(n.backward_ms for n in nodes)]
        times += [sum(n.launch_ms for n in nodes)] * launched
        sizes = [sum(getattr(n, f"{what}_bytes") for n in nodes) for what in ("output", "kept", "parameter")]
        count = [] if few else [str(len(nodes))]
        rows.append([name, *count, *(f"{ms:.3f}" for ms in times), *map(format_bytes, sizes)])
    yield Table([*heads, ">out", ">kept", ">weights"], rows)
    if not few:
        yield f"{format_count(len(costs.nodes), 'node')} in all, {costs.compute_ms:.3f} ms; costs.nodes lists them"
    else:
        yield from ("together: " + " ".join(names) for names in costs.together)
        yield from (f"ordered: {a} before {b}" for a, b in costs.ordered)
    calls = [n.signature for n in costs.nodes if n.signature and not n.op.startswith("get_attr")]
    # Layers repeat, and the same operator takes the same time on the same shapes and dtypes.
    if len(set(calls)) < len(calls):
        how = "estimated" if costs.estimated else "measured"
        yield f"{how}: {len(set(calls))} operators, for {len(calls)} nodes that call one of them alike"
    if costs.hardware:
        yield f"measured on: {costs.hardware}"
    if costs.estimated:
        yield costs.estimated.details


def sum_by_module(nodes: Sequence[Any], most: int) -> dict[str, list[Any]]:
    """Return the nodes of each of the slowest modules, at most `most` modules, the slowest first.

    Repeated layers count together: `layers.*.mlp` stands for all modules with a number there. A group with
    more than half of the total time is split into its parts, if it has parts. A node outside of any module is a group
    by its name.
    """
    divided: set[str] = set()
    while True:
        groups: dict[str, list[Any]] = defaultdict(list)
        for node in nodes:
            groups[_name_group(node, divided)].append(node)
        time = {name: sum(n.forward_ms + n.backward_ms for n in held) for name, held in groups.items()}
        ordered = sorted(time, key=lambda name: (-time[name], name))
        # Repeat until no group takes more than half of the total, or the heavy groups have no parts.
        heavy = next((n for n in ordered if time[n] > sum(time.values()) / 2 and _has_parts(groups[n], n)), None)
        if heavy is None:
            return {_name_shown(name, groups[name]): groups[name] for name in ordered[:most]}
        divided.add(heavy)


def _name_group(node: Any, divided: set[str]) -> str:
    """Return the group of a node: the shortest prefix of its module's path that is not `divided` into parts."""
    parts = _split_path(node)
    taken = 1
    while taken < len(parts) and ".".join(parts[:taken]) in divided:
        taken += 1
    return ".".join(parts[:taken])


def _split_path(node: Any) -> list[str]:
    """Return the parts of a node's module path. A number is joined to the name before it.

    Without a module: the node's name.
    """
    return re.sub(r"\.\d+(?=\.|$)", ":*", node.owner).split(".") if node.owner else [node.name]


def _has_parts(nodes: Sequence[Any], name: str) -> bool:
    """Return whether some nodes of a group are in deeper submodules."""
    return any(len(_split_path(node)) > name.count(".") + 1 for node in nodes)


def _name_shown(group: str, nodes: Sequence[Any]) -> str:
    """Return the name of a group as tables show it.

    A number stands in place of `*` if all its nodes have that number.
    """
    paths = Counter(".".join(node.module.split(".")[: group.replace(":", ".").count(".") + 1]) for node in nodes)
    shown = group.replace(":", ".")
    return next(iter(paths)) if "*" in shown and len(paths) == 1 else shown
