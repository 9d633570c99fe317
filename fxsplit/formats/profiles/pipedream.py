"""PipeDream's graph.txt (Narayanan et al. 2019): a line for each node, and an indented line for each edge.

    node1 -- Input -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=40.0, parameter_size=0.0
    node2 -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=64.0
        node1 -- node2

Times are in ms, sizes in bytes. A node with several outputs has a list of sizes, `[8.0; 4.0]`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from fxsplit.errors import ProfileError
from fxsplit.formats.profiles.foreign import ProfileFile, sort_topologically
from fxsplit.ir.facts.costs.costs import Costs, InputCost, NodeCost
from fxsplit.system.figures import AMOUNT, SHOWN, is_amount

# The order of a node's figures, on which `_read_node` relies.
FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FIGURE = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")


def parse(text: str, name: str) -> ProfileFile:
    """Return the profile in `text`, the contents of the file `name`. Raises ProfileError with line and value.

    As in PipeDream, nodes described as Input are inputs of the model: they cost nothing and lie in the first stage.
    """
    nodes, edges = _lines(text, name)
    makers: dict[str, list[str]] = {n: [] for n in nodes}
    for a, b in edges:
        makers[b].append(a)
    read = {a for a, _ in edges}
    order = sort_topologically(makers, name)
    given = [n for n in order if not makers[n] and nodes[n].op.startswith("Input")]
    own = [n for n in order if n not in set(given)]
    if not own:
        raise ProfileError(f"{name!r} has no nodes: a PipeDream profile has lines like 'node1 -- ReLU -- ...'")
    # Keep an unused result without cost, such as an unused item of a tuple, with the node that makes it. By itself it
    # could lie in any stage, and would double the states for nothing.
    free = {n for n in own if not (nodes[n].forward_ms or nodes[n].backward_ms or nodes[n].parameter_bytes)} - read
    idle = [n for n in own if n in free and len(makers[n]) == 1]
    costs = Costs(
        nodes=tuple(replace(nodes[n], inputs=tuple(makers[n])) for n in own),
        inputs=tuple(InputCost(n, nodes[n].output_bytes, 0) for n in given),
        outputs=(),
        together=tuple((makers[n][0], n) for n in idle if makers[n][0] not in set(given)),
        rows=1,  # the file does not state the number of rows
        device_kind="cuda",
    )
    costs.check()
    return ProfileFile(costs, "pipedream")


def _lines(text: str, name: str) -> tuple[dict[str, NodeCost], list[tuple[str, str]]]:
    """Return the nodes by id, without their inputs, and each edge once.

    Raises ProfileError for a line that is neither a node nor an edge.
    """
    nodes: dict[str, NodeCost] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.strip().split(" -- ")
        where = f"{name!r}, line {number}"
        # A description may contain the separator, so a line with three or more parts is a node.
        if line[0].isspace() and len(parts) == 2:
            edges.setdefault((parts[0], parts[1]), number)
        elif len(parts) >= 3:
            if parts[0] in nodes:
                raise ProfileError(f"{where}: node {parts[0]!r} appears twice: ids must be unique")
            nodes[parts[0]] = _read_node(parts[0], " -- ".join(parts[1:-1]), parts[-1], where)
        else:
            raise ProfileError(
                f"{where} is neither a node ('id -- description -- times') nor an indented edge ('id -- id'): "
                f"{line.strip()[:60]!r}; is this a complete profile?"
            )
    # An edge may come before its nodes, so look up the ids at the end.
    for (a, b), number in edges.items():
        for end in (a, b):
            if end not in nodes:
                raise ProfileError(
                    f"{name!r}, line {number}: edge {a} -- {b} names {end!r}, which is no node of the file"
                )
    return nodes, list(edges)


def _read_node(name: str, description: str, text: str, where: str) -> NodeCost:
    """Return a node without inputs. Raises ProfileError unless `text` has the four figures of a node.

    A list of sizes counts as its sum.
    """
    found = dict(_FIGURE.findall(text))
    figures = []
    for figure in FIGURES:
        if figure not in found:
            raise ProfileError(f"{where}: {figure}= is missing; is the file cut off?")
        # PipeDream writes the sizes of several outputs as a list.
        words = found[figure].strip("[]").replace(";", " ").split()
        try:
            value = sum(float(word) for word in words)
        except ValueError as error:
            raise ProfileError(f"{where}: {figure}={found[figure][:SHOWN]} is no number") from error
        if not is_amount(value):
            raise ProfileError(f"{where}: {figure}={found[figure][:SHOWN]}: give {AMOUNT}")
        figures.append(value)
    # The file has one size, for the output, its gradient, and the activation kept for the backward.
    forward, backward, size, parameters = figures
    return NodeCost(
        name=name,
        op=description,
        module="",
        signature=description,
        inputs=(),
        forward_ms=forward,
        backward_ms=backward,
        output_bytes=size,
        gradient_bytes=size,
        kept_bytes=size,
        parameter_bytes=parameters,
        buffer_bytes=0,
    )
