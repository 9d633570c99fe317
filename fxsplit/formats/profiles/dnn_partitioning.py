"""The JSON of the dnn-partitioning workloads (Tarnawski et al. 2020): node latencies and edge transfer times.

    {"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 1000.0,
     "nodes": [{"id": 0, "name": "a", "fpgaLatency": 1.0, "cpuLatency": 10.0, "size": 100.0, "supportedOnFpga": 1,
                "isBackwardNode": 0, "colorClass": 1}, ...],
     "edges": [{"sourceId": 0, "destId": 1, "cost": 0.5, "size": 10.0}, ...]}

Latencies and costs are in ms, sizes in bytes; FPGA stands for any accelerator. All nodes of a colour class are on one
device. A backward node is placed with the forward nodes of its class, its *mates*; without mates it is an *orphan*. The
*home* of a node is the name that is placed: the node's own, or its mate's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fxsplit.errors import ProfileError
from fxsplit.formats.profiles.foreign import ProfileFile, sort_topologically
from fxsplit.ir.facts.costs.costs import Costs, Exchange, NodeCost
from fxsplit.ir.facts.given.machine import MAX_DEVICES
from fxsplit.system.figures import AMOUNT, is_amount, show

BYTES_PER_MS = 2.0**31
"""If edges state times, each millisecond counts as this number of bytes. The link then moves as many bytes per ms."""

LEAST = 1e-300
"""The memory of a device that can hold nothing, in bytes: a device needs a positive size."""

NEVER = 1e6
"""On an accelerator, a node without support takes this many times the time of all nodes, so no plan puts it there."""


def parse(data: Any, name: str, by_bytes: bool) -> ProfileFile:
    """Return the profile in `data`, the JSON of the file `name`. Raises ProfileError with place and value.

    The file also states devices and memory. A tensor between backward nodes becomes an exchange: it costs a transfer,
    but does not order the homes. A transfer takes the time that its edge states. With `by_bytes` it takes the time for
    its size.
    """
    nodes = _nodes(data, name)
    edges = _edges(data, nodes, name)
    home, extra = _homes(nodes)
    before: dict[str, dict[str, None]] = {h: {} for h in home.values()}
    for a, b, *_ in edges:
        if not nodes[a]["backward"] and not nodes[b]["backward"] and home[a] != home[b]:
            before[home[b]][home[a]] = None
    # A cycle of forward nodes is an error. A cycle through orphans (below) only keeps them on one device.
    sort_topologically(before, name)
    for a, b, *_ in edges if extra else ():
        if nodes[a]["backward"] and nodes[b]["backward"] and {home[a], home[b]} & extra and home[a] != home[b]:
            # Backward runs against the order of homes, so an orphan's home comes after the homes of the nodes it feeds.
            before[home[a]][home[b]] = None
    knots = _knots(before) if extra else []
    # Members of a knot stay together, so their needs of each other must not order them.
    for knot in knots:
        for h in knot:
            before[h] = {maker: None for maker in before[h] if maker not in knot}
    order = sort_topologically(_merge_needs(before, knots), name)
    position = {h: i for i, h in enumerate(order)}
    together = [tuple(sorted(c, key=position.__getitem__)) for c in [*_classes(nodes, home), *knots]]
    members = defaultdict(list)
    for i, h in home.items():
        members[h].append(nodes[i])
    # Longer than the whole graph, even if no node takes time.
    total = sum(n["ms"] for n in nodes.values()) + 1.0
    costs = Costs(
        nodes=tuple(_cost(h, members[h], tuple(before[h]), total) for h in order),
        inputs=(),
        outputs=(),
        together=tuple(c for c in together if len(c) > 1),
        rows=1,
        device_kind="accelerator",
        exchanges=_exchanges(edges, home, by_bytes),
    )
    costs.check()
    return ProfileFile(
        costs=costs,
        format="dnn-partitioning",
        accelerators=_count(data, "maxFPGAs", name),
        hosts=_count(data, "maxCPUs", name),
        memory_bytes=_number(data, "maxSizePerFPGA", f"{name!r}") or LEAST,
        bytes_per_s=BYTES_PER_MS * 1000.0,
        cost_model="direct",
        never_ms=NEVER * total,
        nominal_bytes_per_ms=0.0 if by_bytes else BYTES_PER_MS,
    )


def _nodes(data: Any, name: str) -> dict[Any, dict[str, Any]]:
    """Return the nodes by id. Raises ProfileError for a node without an id or with an invalid value."""
    if not isinstance(data["nodes"], list) or not data["nodes"]:
        raise ProfileError(f"{name!r} has no nodes")
    nodes: dict[Any, dict[str, Any]] = {}
    for i, node in enumerate(data["nodes"]):
        where = f"{name!r}, node {i}"
        if not isinstance(node, dict) or not isinstance(node.get("id"), (int, str)):
            raise ProfileError(f"{where} has no id: is this a dnn-partitioning file?")
        if node["id"] in nodes:
            raise ProfileError(f"{where} has the id {node['id']!r} of an earlier one: ids must be unique")
        if not isinstance(node.get("colorClass"), (int, str, type(None))):
            raise ProfileError(f"{where} has colorClass={show(node['colorClass'])}: give a number")
        nodes[node["id"]] = {
            "name": str(node.get("name", node["id"])),
            "ms": _number(node, "fpgaLatency", where),
            "host_ms": _number(node, "cpuLatency", where),
            "bytes": _number(node, "size", where),
            "backward": bool(node.get("isBackwardNode", False)),
            "color": node.get("colorClass"),
            # Inference files omit fields for training. A node is supported unless the file denies it.
            "supported": bool(node.get("supportedOnFpga", True)),
        }
    # Users pin nodes by name. If names are not unique, append ids.
    names = [n["name"] for n in nodes.values()]
    if len(set(names)) < len(names):
        for i, node in nodes.items():
            node["name"] = f"{node['name']}#{i!r}"
    return nodes


def _edges(data: Any, nodes: dict[Any, Any], name: str) -> list[tuple[Any, Any, float, float]]:
    """Return the edges as (source id, target id, ms, bytes). Raises ProfileError for an edge to an unknown node."""
    if not isinstance(data["edges"], list):
        raise ProfileError(f"{name!r} has edges={show(data['edges'])}: give a list")
    # An edge refers to nodes by id, a number or a text. Other values may be unhashable.
    found = []
    for i, edge in enumerate(data["edges"]):
        where = f"{name!r}, edge {i}"
        for end in ("sourceId", "destId"):
            known = isinstance(edge, dict) and isinstance(edge.get(end), (int, str)) and edge[end] in nodes
            if not known:
                missing = edge.get(end) if isinstance(edge, dict) else edge
                raise ProfileError(f"{where}: {end} is {show(missing)}, which is no node of the file")
        ms, size = _number(edge, "cost", where), _number(edge, "size", where) if "size" in edge else 0.0
        found.append((edge["sourceId"], edge["destId"], ms, size))
    return found


def _homes(nodes: dict[Any, dict[str, Any]]) -> tuple[dict[Any, str], set[str]]:
    """Return the home of each node by id, and the set of homes that belong to orphans."""
    # The first forward node of a class is the mate: iterate in reverse, since later entries win.
    mates = {n["color"]: n["name"] for n in reversed(nodes.values()) if not n["backward"] and n["color"] is not None}
    home, orphans = {}, set()
    # Orphans of one class share the home of the first.
    alone: dict[Any, str] = {}
    for i, n in nodes.items():
        home[i] = n["name"]
        if n["backward"]:
            home[i] = mates.get(n["color"]) or alone.setdefault(
                n["color"] if n["color"] is not None else (i,), n["name"]
            )
            orphans |= {home[i]} - set(mates.values())
    return home, orphans


def _classes(nodes: dict[Any, dict[str, Any]], home: dict[Any, str]) -> list[set[str]]:
    """Return the homes of each colour class, which must be on one device."""
    classes: dict[Any, set[str]] = defaultdict(set)
    for i, n in nodes.items():
        if n["color"] is not None:
            classes[n["color"]].add(home[i])
    return list(classes.values())


def _knots(before: dict[str, dict[str, None]]) -> list[set[str]]:
    """Return the sets of homes on a common cycle: the strongly connected components with more than one home."""
    import networkx as nx  # the import takes a fifth of a second, and only this format needs it

    graph = nx.DiGraph([(maker, h) for h, makers in before.items() for maker in makers])
    return sorted((c for c in nx.strongly_connected_components(graph) if len(c) > 1), key=min)


def _merge_needs(before: dict[str, dict[str, None]], knots: list[set[str]]) -> dict[str, list[str]]:
    """Return the inputs of each home. All members of a knot get the same: the inputs that any member has from outside.

    A knot is a set of homes on a common cycle, which stay on one device.
    """
    needs = {h: list(makers) for h, makers in before.items()}
    for knot in knots:
        members = [h for h in before if h in knot]
        outside = list(dict.fromkeys(maker for h in members for maker in before[h]))
        needs |= dict.fromkeys(members, outside)
    return needs


def _cost(name: str, members: list[dict[str, Any]], inputs: tuple[str, ...], total: float) -> NodeCost:
    """Return the costs of the home `name`: a forward node together with its backward mates.

    `total`: the time of all nodes.
    """

    # Express a node without support on accelerators as a time that no plan can afford.
    def ms(backward: bool) -> float:
        return sum(n["ms"] if n["supported"] else NEVER * total for n in members if n["backward"] == backward)

    return NodeCost(
        name=name,
        op=name,
        module="",
        signature=name,
        inputs=inputs,
        forward_ms=ms(False),
        backward_ms=ms(True),
        output_bytes=0,
        gradient_bytes=0,
        kept_bytes=0,
        parameter_bytes=0,
        # The size of a node is the memory it needs on its device, of any kind.
        buffer_bytes=sum(n["bytes"] for n in members),
        host_ms=sum(n["host_ms"] for n in members),
    )


def _exchanges(
    edges: list[tuple[Any, Any, float, float]], home: dict[Any, str], by_bytes: bool
) -> tuple[Exchange, ...]:
    """Return every tensor as an exchange: its bytes, and the homes that make and read it.

    Edges from one node with the same price are one tensor. A stage receives a tensor once, even if several of its nodes
    read it.
    """
    nets: dict[tuple[Any, float], dict[str, None]] = {}
    for a, b, ms, size in edges:
        price = size if by_bytes else ms * BYTES_PER_MS
        nets.setdefault((a, price), {home[a]: None})[home[b]] = None
    return tuple(Exchange(price, tuple(names)) for (_, price), names in nets.items() if price > 0 and len(names) > 1)


def _number(record: Any, key: str, where: str) -> float:
    """Return a finite number, zero or more. Raises ProfileError for any other value."""
    value = record.get(key)
    if not is_amount(value):
        raise ProfileError(f"{where} has {key}={show(value)}: give {AMOUNT}")
    return float(value)


def _count(data: Any, key: str, name: str) -> int:
    """Return a number of devices, from 0 to MAX_DEVICES. Raises ProfileError for any other value."""
    value = data.get(key, 0)
    if type(value) is not int or not 0 <= value <= MAX_DEVICES:
        raise ProfileError(f"{name!r} has {key}={show(value)}: give a whole number of devices, at most {MAX_DEVICES}")
    return value
