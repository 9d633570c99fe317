"""Check costs: raise errors for costs that cannot be right. costs.py imports this file, which so cannot import it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fxsplit.errors import ProfileError
from fxsplit.system.figures import check_record, is_count, show


def check_costs(costs: Any) -> None:
    """Raise ProfileError, which names the place, for costs that cannot be right.

    Names must be unique, each node must come after the nodes that it reads, and figures must be in their ranges.
    """
    if not is_count(costs.rows, least=0):
        raise ProfileError(f"the profile is of microbatches of {show(costs.rows)} rows: give a number of at least 0")
    known: set[str] = set()
    # `known` grows node by node, so an input that is made later is found too: the order must be topological.
    for kind, record in (*(("input", i) for i in costs.inputs), *(("node", n) for n in costs.nodes)):
        what = f"{kind} {show(record.name)}"
        check_record(what, record)
        if record.name in known:
            raise ProfileError(f"{what} appears twice in the profile: names must be unique")
        if kind == "node":
            check_node(record, known)
        known.add(record.name)
    for number, exchange in enumerate(costs.exchanges):
        check_record(f"exchange {number}", exchange)
        if not exchange.nodes:
            raise ProfileError(f"exchange {number} has no nodes: give the nodes that make or read the tensor")
    if costs.loss is not None:
        check_record("the loss", costs.loss)
    for number, tie in enumerate(costs.tied):
        check_record(f"tied parameter {number}", tie)
    check_memory(costs.nodes, known)
    # Constraints must name existing nodes, or a misspelt name would silently drop a constraint.
    made = known - {i.name for i in costs.inputs}
    constraints = (*costs.together, *costs.ordered, *(e.nodes for e in costs.exchanges), *(t.nodes for t in costs.tied))
    # An input may be returned unchanged, but it is no node that could stay together with other nodes.
    named = [(costs.outputs, known), *((names, made) for names in constraints)]
    for name, among in ((name, among) for names, among in named for name in names):
        if not isinstance(name, str) or name not in among:
            raise ProfileError(
                f"the profile refers to {show(name)}, which is none of its nodes: profile the model again"
            )


def check_node(node: Any, known: Collection[str]) -> None:
    """Raise ProfileError if a node reads a name that is not in `known`, or has `weight_ms` above `backward_ms`."""
    for name in node.inputs:
        if name not in known:
            raise ProfileError(
                f"node {show(node.name)} reads {show(name)}, which no earlier node or input makes: "
                "the profile is incomplete or has a cycle; profile the model again"
            )
    if node.late_ms > node.backward_ms:
        raise ProfileError(
            f"node {node.name!r} has weight_ms={node.weight_ms}, which is part of backward_ms={node.backward_ms}: "
            "give at most that"
        )


def check_memory(nodes: Sequence[Any], known: Collection[str]) -> None:
    """Raise ProfileError unless each `kept_for` names a later node, and each `lies_in` an earlier node or an input."""
    later: set[str] = set()
    earlier = set(known) - {node.name for node in nodes}
    for node in reversed(nodes):
        if node.kept_for_bytes and (node.kept_for not in later or node.kept_for_bytes > node.kept_bytes):
            raise ProfileError(
                f"node {show(node.name)} has kept_for_bytes={node.kept_for_bytes} of kept_bytes={node.kept_bytes} for "
                f"{show(node.kept_for)}, which is no later node, or more than there is: profile the model again"
            )
        later.add(node.name)
    for node in nodes:
        if node.lies_in and node.lies_in not in earlier:
            raise ProfileError(
                f"node {show(node.name)} lies in {show(node.lies_in)}, which no earlier node or input makes: profile "
                "the model again"
            )
        earlier.add(node.name)
