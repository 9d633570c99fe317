"""PipeDream's graph.txt: a line a node, `id -- description -- times and sizes`, and an indented line an edge."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxsplit.errors import ProfileError
from fxsplit.formats.acyclic import sort_topologically
from fxsplit.formats.foreign import TOO_LARGE, Profile
from fxsplit.ir.facts.costs import Costs, InputCost, NodeCost

FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FIGURE = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")


@dataclass(frozen=True)
class _Node:
    description: str
    figures: dict[str, float]


def parse(text: str, name: str) -> Profile:
    """Return the profile in `text`; times are milliseconds, sizes bytes.

    As in PipeDream, nodes described as Input are what the model is given: they cost nothing and lie in the first stage.
    A result that nobody reads stays with what makes it.
    """
    nodes, edges = _lines(text, name)
    readers: dict[str, list[str]] = {n: [] for n in nodes}
    makers: dict[str, list[str]] = {n: [] for n in nodes}
    for a, b in edges:
        readers[a].append(b)
        makers[b].append(a)
    order = sort_topologically(makers, name)
    given = [n for n in order if not makers[n] and nodes[n].description.startswith("Input")]
    own = [n for n in order if n not in set(given)]
    if not own:
        raise ProfileError(f"{name!r} has no nodes: a PipeDream profile has lines like 'node1 -- ReLU -- ...'")
    idle = [n for n in own if not readers[n] and len(makers[n]) == 1 and not _weighs(nodes[n])]
    costs = Costs(
        nodes=tuple(_cost(n, nodes[n], tuple(makers[n])) for n in own),
        inputs=tuple(InputCost(n, nodes[n].figures["activation_size"], 0) for n in given),
        outputs=(),
        together=tuple((makers[n][0], n) for n in idle if makers[n][0] not in set(given)),
        rows=1,
        device_kind="cuda",
    )
    costs.check()
    return Profile(costs, "pipedream")


def _lines(text: str, name: str) -> tuple[dict[str, _Node], list[tuple[str, str]]]:
    """Return nodes by their ids and the edges, each once."""
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.strip().split(" -- ")
        where = f"{name!r}, line {number}"
        if line[0].isspace() and len(parts) == 2:
            edges.setdefault((parts[0], parts[1]), number)
        elif len(parts) >= 3:
            if parts[0] in nodes:
                raise ProfileError(f"{where}: node {parts[0]!r} stands twice: ids must be unique")
            nodes[parts[0]] = _Node(" -- ".join(parts[1:-1]), _figures(parts[-1], where))
        else:
            raise ProfileError(
                f"{where} is neither a node ('id -- description -- times') nor an indented edge ('id -- id'): "
                f"{line.strip()[:60]!r}; is this a profile, and whole?"
            )
    for (a, b), number in edges.items():
        for end in (a, b):
            if end not in nodes:
                raise ProfileError(
                    f"{name!r}, line {number}: edge {a} -- {b} names {end!r}, which is no node of the file"
                )
    return nodes, list(edges)


def _figures(text: str, where: str) -> dict[str, float]:
    """Return the four figures of a node; a list of sizes is summed."""
    found = dict(_FIGURE.findall(text))
    figures = {}
    for figure in FIGURES:
        if figure not in found:
            raise ProfileError(f"{where}: {figure}= is missing; is the file cut off?")
        words = found[figure].strip("[]").replace(";", " ").split()
        try:
            value = sum(float(word) for word in words)
        except ValueError as error:
            raise ProfileError(f"{where}: {figure}={found[figure]} is no number") from error
        if not 0 <= value < TOO_LARGE:
            raise ProfileError(f"{where}: {figure}={found[figure]}: give a finite number, zero or more")
        figures[figure] = value
    return figures


def _weighs(node: _Node) -> bool:
    """Return whether a node takes time or memory for itself."""
    return any(node.figures[f] for f in (FIGURES[0], FIGURES[1], FIGURES[3]))


def _cost(name: str, node: _Node, inputs: tuple[str, ...]) -> NodeCost:
    """Return a node's costs; the gradient of an activation is as large as the activation."""
    forward, backward, activation, parameters = (node.figures[f] for f in FIGURES)
    size = activation
    return NodeCost(
        name=name,
        op=node.description,
        module="",
        signature=node.description,
        inputs=inputs,
        forward_ms=forward,
        backward_ms=backward,
        output_bytes=size,
        gradient_bytes=size,
        kept_bytes=size,
        parameter_bytes=parameters,
        buffer_bytes=0,
    )
