"""The JSON of the dnn-partitioning workloads (Tarnawski et al. 2020): latencies of nodes, transfer times of edges."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fxsplit.errors import ProfileError
from fxsplit.formats.acyclic import sort_topologically
from fxsplit.formats.foreign import TOO_LARGE, Profile
from fxsplit.ir.facts.costs import Costs, Exchange, NodeCost

BYTES_PER_MS = 2.0**31
"""Where edges state times, a time is written as this many bytes a millisecond over a link that moves as many."""

LEAST = 1e-300
"""Bytes of a memory that holds nothing."""

NEVER = 1e6
"""A node that an accelerator does not support takes this many times everything else there."""


def parse(data: Any, name: str, by_bytes: bool) -> Profile:
    """Return the profile in a parsed file.

    Accelerators and hosts, and the accelerators' memory, come from the file. A backward node lies with the forward
    nodes of its colour class, or by itself where it has none; tensors between backward nodes are exchanges, which set
    no order. Transfers cost what their edges state, or with `by_bytes` what their bytes take.
    """
    nodes = _nodes(data, name)
    edges = _edges(data, nodes, name)
    home, extra = _homes(nodes)
    before: dict[str, dict[str, None]] = {h: {} for h in home.values()}
    for a, b, *_ in edges:
        if not nodes[a]["backward"] and not nodes[b]["backward"] and home[a] != home[b]:
            before[home[b]][home[a]] = None
    sort_topologically(
        before, name
    )  # a cycle of forward nodes is an error; one through orphans only keeps them together
    for a, b, *_ in edges if extra else ():
        if nodes[a]["backward"] and nodes[b]["backward"] and {home[a], home[b]} & extra and home[a] != home[b]:
            before[home[a]][home[b]] = None  # an orphan's place mirrors that of its neighbours
    knots = _knots(before) if extra else []
    for knot in knots:
        for h in knot:
            before[h] = {maker: None for maker in before[h] if maker not in knot}
    order = sort_topologically(_grouped(before, knots), name)
    position = {h: i for i, h in enumerate(order)}
    together = [tuple(sorted(c, key=position.__getitem__)) for c in [*_classes(nodes, home), *knots]]
    members = defaultdict(list)
    for i, h in home.items():
        members[h].append(nodes[i])
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
    return Profile(
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
    """Return the nodes by their ids."""
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
            raise ProfileError(f"{where} has colorClass={node['colorClass']!r}: give a number")
        nodes[node["id"]] = {
            "name": str(node.get("name", node["id"])),
            "ms": _number(node, "fpgaLatency", where),
            "host_ms": _number(node, "cpuLatency", where),
            "bytes": _number(node, "size", where),
            "backward": bool(node.get("isBackwardNode", False)),
            "color": node.get("colorClass"),
            "supported": bool(node.get("supportedOnFpga", True)),
        }
    names = [n["name"] for n in nodes.values()]
    if len(set(names)) < len(names):
        for i, node in nodes.items():
            node["name"] = f"{node['name']}#{i!r}"
    return nodes


def _edges(data: Any, nodes: dict[Any, Any], name: str) -> list[tuple[Any, Any, float, float]]:
    """Return the edges as (source, target, milliseconds, bytes)."""
    if not isinstance(data["edges"], list):
        raise ProfileError(f"{name!r} has edges={data['edges']!r}: give a list")
    found = []
    for i, edge in enumerate(data["edges"]):
        where = f"{name!r}, edge {i}"
        for end in ("sourceId", "destId"):
            known = isinstance(edge, dict) and isinstance(edge.get(end), (int, str)) and edge[end] in nodes
            if not known:
                missing = edge.get(end) if isinstance(edge, dict) else edge
                raise ProfileError(f"{where}: {end} is {missing!r}, which is no node of the file")
        ms, size = _number(edge, "cost", where), _number(edge, "size", where) if "size" in edge else 0.0
        found.append((edge["sourceId"], edge["destId"], ms, size))
    return found


def _homes(nodes: dict[Any, dict[str, Any]]) -> tuple[dict[Any, str], set[str]]:
    """Return the name under which each node is placed, and which of them are backward nodes without a mate."""
    mates = {n["color"]: n["name"] for n in reversed(nodes.values()) if not n["backward"] and n["color"] is not None}
    home, orphans = {}, set()
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
    """Return the colour classes, which no cut may part."""
    classes: dict[Any, set[str]] = defaultdict(set)
    for i, n in nodes.items():
        if n["color"] is not None:
            classes[n["color"]].add(home[i])
    return list(classes.values())


def _knots(before: dict[str, dict[str, None]]) -> list[set[str]]:
    """Return the places that lie on a cycle with each other."""
    import networkx as nx  # takes a fifth of a second to load, which other files need not wait for

    graph = nx.DiGraph([(maker, h) for h, makers in before.items() for maker in makers])
    return sorted((c for c in nx.strongly_connected_components(graph) if len(c) > 1), key=min)


def _grouped(before: dict[str, dict[str, None]], knots: list[set[str]]) -> dict[str, list[str]]:
    """Return what each place needs, where a knot needs all that its members need before any of them."""
    needs = {h: list(makers) for h, makers in before.items()}
    for knot in knots:
        members = [h for h in before if h in knot]
        outside = list(dict.fromkeys(maker for h in members for maker in before[h]))
        for h in members:
            needs[h] = outside
    return needs


def _cost(name: str, members: list[dict[str, Any]], inputs: tuple[str, ...], total: float) -> NodeCost:
    """Return the costs of a forward node and its backward mates."""

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
        buffer_bytes=sum(n["bytes"] for n in members),
        host_ms=sum(n["host_ms"] for n in members),
    )


def _exchanges(
    edges: list[tuple[Any, Any, float, float]], home: dict[Any, str], by_bytes: bool
) -> tuple[Exchange, ...]:
    """Return every tensor: what one node gives to others at one price, with the places that make and read it."""
    nets: dict[tuple[Any, float], dict[str, None]] = {}
    for a, b, ms, size in edges:
        price = size if by_bytes else ms * BYTES_PER_MS
        nets.setdefault((a, price), {home[a]: None})[home[b]] = None
    return tuple(Exchange(price, tuple(names)) for (_, price), names in nets.items() if price > 0 and len(names) > 1)


def _number(record: Any, key: str, where: str) -> float:
    """Return a finite number, zero or more."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < TOO_LARGE:
        raise ProfileError(f"{where} has {key}={str(value)[:40]}: give a finite number, zero or more")
    return float(value)


def _count(data: Any, key: str, name: str) -> int:
    """Return a whole number of devices."""
    value = data.get(key, 0)
    if type(value) is not int or value < 0:
        raise ProfileError(f"{name!r} has {key}={value!r}: give a whole number of devices")
    return value
