"""Find in a graph what a number is divided by, as a graph of its own that needs the inputs alone."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxsplit.ir.facts.counts import LABEL_FUNCTIONS, LABEL_MODULES, count_labels, is_mean, read_options
from fxsplit.ir.facts.numbers import list_number_nodes

aten = torch.ops.aten

DIVISIONS = {operator.truediv, torch.div, torch.true_divide, "div", "true_divide", aten.div.Tensor}
LABEL_OPERATORS = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
PASSED = {
    *(operator.mul, operator.neg, torch.mul, torch.neg, "mul", "neg", aten.mul.Tensor, aten.neg.default),
    *("to", "float", "double", "view", "reshape", "squeeze", "clone", "contiguous", torch.reshape, torch.squeeze),
    *(aten.to.dtype, aten.view.default, aten.reshape.default, aten.squeeze.default, aten.clone.default),
}
"""What only scales or reshapes a number, where nothing else of the graph is an operand."""


def find_count(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return a graph that computes from the inputs of `gm` what `node`, a number, is divided by; None for none.

    None too where it is not made of inputs and buffers alone.
    """
    numbers = list_number_nodes(gm.graph)
    while not (operands := _find_operands(gm, node)):
        # What scales or reshapes the number changes no weight of a microbatch; Python numbers are placeholders as well.
        inputs = [n for n in node.all_input_nodes if n not in numbers]
        if len(inputs) != 1 or node.target not in PASSED | DIVISIONS:
            return None
        node = inputs[0]
    return _extract(gm, operands)


def is_safe(count: fx.GraphModule) -> bool:
    """Return whether a number divided by this count, of a graph that `find_count` returned, is safe (see `Count`)."""
    made = count.graph.output_node().args[0]
    # torch gives labels that are ignored a gradient of zero, and divides those of classes without weight by zero.
    return isinstance(made, fx.Node) and made.target is count_labels and made.args[1] is None


def find_inner_counts(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Return such a graph for everything that is divided on the way to `node`."""
    for inner in _list_ancestors([node]):
        count = _extract(gm, _find_operands(gm, inner))
        if count is not None:
            yield count


def _extract(gm: fx.GraphModule, operands: Sequence[Any]) -> fx.GraphModule | None:
    """Return a graph that computes a count of operands from the inputs of `gm`; None where that takes more."""
    # Most nodes are divided by nothing, and most divisors are made with weights: both are told from few nodes.
    needed = _list_ancestors([operand for operand in operands if isinstance(operand, fx.Node)])
    if not needed or any(_uses_weights(gm, node) for node in needed):
        return None
    needed = _add_writes(gm, needed)
    if any(_uses_weights(gm, node) for node in needed) or not any(node.op == "placeholder" for node in needed):
        return None
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in needed or node.op == "placeholder":
            copied[node] = graph.node_copy(node, copied.__getitem__)
    # forward() may write to its arguments, and these are the caller's.
    if any(_writes(node) for node in needed):
        for place in (n for n in needed if n.op == "placeholder"):
            with graph.inserting_after(copied[place]):
                clone = graph.call_method("clone", (copied[place],))
            copied[place].replace_all_uses_with(clone)
            clone.args = (copied[place],)  # which its own argument was replaced by, too
    made = [graph.get_attr(o) if isinstance(o, str) else fx.map_arg(o, copied.__getitem__) for o in operands]
    graph.output(made[0] if len(made) == 1 else graph.call_function(count_labels, tuple(made)))
    return fx.GraphModule(gm, graph)


def _find_operands(gm: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Return what the count of a number is made of: a divisor alone; labels, weight and ignore_index; or nothing.

    A weight may be the path of a buffer.
    """
    if node.op == "call_module":
        return _read_module(gm, node)
    if node.target in (*LABEL_FUNCTIONS, *LABEL_OPERATORS):
        return _read_call(node)
    if node.target in DIVISIONS and len(node.args) == 2 and isinstance(node.args[1], fx.Node):
        return [node.args[1]]
    return []


def _read_module(gm: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Return labels, weight and ignore_index of a call of a loss's module; nothing for another module."""
    loss = gm.get_submodule(str(node.target))
    if type(loss) not in LABEL_MODULES or loss.reduction != "mean" or len(node.args) != 2:
        return []
    return [node.args[1], None if loss.weight is None else f"{node.target}.weight", loss.ignore_index]


def _read_call(node: fx.Node) -> list[Any]:
    """Return labels, weight and ignore_index of a call of a loss's function; nothing where it is no mean."""
    if node.target in LABEL_OPERATORS:
        # They have their reduction, a number, before `ignore_index`, and none of the older options.
        names = ("input", "target", "weight", "reduction", "ignore_index")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    else:
        given = read_options(node.args, node.kwargs)
    return [] if not is_mean(given) else [given["target"], given.get("weight"), given.get("ignore_index", -100)]


def _add_writes(gm: fx.GraphModule, needed: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes in `needed`, with those that write to any of them and what these are computed from."""
    writes = {node: _list_ancestors([node.all_input_nodes[0]]) for node in gm.graph.nodes if _writes(node)}
    while True:
        # What a node writes to may be a view of what is needed: then it is made of nodes of the same type.
        more = [w for w, made_of in writes.items() if w not in needed and _may_be_view(w, made_of & needed)]
        if not more:
            return needed
        needed = needed | _list_ancestors(more)


def _list_ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes and all that they are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _may_be_view(write: fx.Node, nodes: set[fx.Node]) -> bool:
    """Return whether what a node writes to may share memory with one of some nodes, which it is made of."""
    kind = _read_dtype(write.all_input_nodes[0])
    return any(_read_dtype(node) == kind for node in nodes)


def _read_dtype(node: fx.Node) -> str:
    """Return the type of a node's entries as the check has noted it, such as "int64"; empty where it has not."""
    return str(node.meta.get("fxsplit_shape", "")).split("[")[0]


def _uses_weights(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node fetches a parameter, or calls a module, which may have some."""
    if node.op == "get_attr":
        return isinstance(operator.attrgetter(str(node.target))(gm), nn.Parameter)
    return node.op == "call_module"


def _writes(node: fx.Node) -> bool:
    """Return whether a node writes to what it is given, by the rule that torch's names follow."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return False
    name = str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target)))
    inplace = bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return inplace or name in ("setitem", "iadd", "isub", "imul", "itruediv") or (name[-1:] == "_" != name[-2:-1])
