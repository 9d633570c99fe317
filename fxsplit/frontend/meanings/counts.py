"""Find the count that a number in a graph is divided by, as a graph of its own that needs only the inputs.

For example, a masked loss `(losses * mask).sum() / mask.sum()` is divided by the count `mask.sum()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fxsplit.frontend.meanings.stand_ins import ValueReads, is_weight, list_ancestors, read_dtype, read_name
from fxsplit.ir.facts.capture.counts import (
    LABEL_FUNCTIONS,
    LABEL_MODULES,
    count_labels,
    count_selected,
    divide_one_by,
    is_mean,
    read_options,
)
from fxsplit.ir.facts.capture.numbers import list_number_nodes
from fxsplit.torch_internals import pytree

aten = torch.ops.aten

DIVISIONS = {"truediv", "itruediv", "div", "div_", "true_divide"}
LABEL_OPERATORS = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
PASSED = {
    *("mul", "mul_", "imul", "neg", "sum", "mean", "view", "reshape", "flatten", "squeeze", "clone", "contiguous"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "_to_copy", "alias"),
}
"""Functions that scale, add up or reshape, by name. If an operand is divided by a count, so is the result."""
ADDITIONS = {"add", "add_", "iadd", "sub", "sub_", "isub"}
SELECTIONS = {"getitem", "masked_select", "index", "index_select"}
"""Names of functions that take some entries of a tensor, by a mask or by indices."""


class Operands(NamedTuple):
    """The operands of a count, and the function that computes the count (None: the only operand is the count itself).

    An operand may be the path of a buffer.
    """

    given: Sequence[Any]
    function: Callable[..., Any] | None = None


def find_count(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return a graph that computes the divisor of `node`, a number, from the inputs of `gm`, or None.

    Returns None if there is no divisor, or several, or if a divisor needs more than inputs and buffers.
    """
    found = _find_counts(gm, node, set(list_number_nodes(gm.graph)))
    return next(iter(found.values())) if len(found) == 1 else None


def is_safe(count: fx.GraphModule) -> bool:
    """Return whether dividing a number by this count is safe for gradients, see `Count`.

    count: a graph that `find_count` has returned.
    """
    made = count.graph.output_node().args[0]
    # torch gives ignored labels a gradient of zero, but divides by zero for classes of weight zero.
    return isinstance(made, fx.Node) and made.target is count_labels and made.args[1] is None


def find_inner_counts(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Yield a graph, as `find_count` returns it, for every division on the way from the inputs to `node`."""
    for inner in list_ancestors([node]):
        count = _extract(gm, _find_operands(gm, inner))
        if count is not None:
            yield count


def _find_counts(gm: fx.GraphModule, node: fx.Node, numbers: set[fx.Node]) -> dict[str, fx.GraphModule]:
    """Return the divisors of a number, if only sums and products lie between the division and the number.

    The key is a text that is equal for counts that are computed alike.
    numbers: the inputs that are Python numbers. They cannot change the weight of a microbatch.
    """
    found: dict[str, fx.GraphModule] = {}
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        node = waiting.pop()
        if node in seen or node in numbers:
            continue
        seen.add(node)
        operands = _find_operands(gm, node)
        count = _extract(gm, operands)
        if count is not None:
            found[_describe(operands)] = count
        name = read_name(node)
        if name in ADDITIONS:
            terms = [_find_counts(gm, term, numbers) for term in _list_terms(node)]
            # A sum is divided by a count if each of its terms is.
            if all(term.keys() == terms[0].keys() for term in terms):
                found |= terms[0]
        elif name in DIVISIONS and isinstance(node.args[0], fx.Node):
            waiting.append(node.args[0])
        elif name in PASSED:
            waiting += node.all_input_nodes
    return found


def _list_terms(node: fx.Node) -> list[fx.Node]:
    """Return the terms of a node that is a sum, or a sum of sums."""
    terms: list[fx.Node] = []
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if read_name(node) in ADDITIONS:
            waiting += node.all_input_nodes
        else:
            terms.append(node)
    return terms


def _extract(gm: fx.GraphModule, operands: Operands) -> fx.GraphModule | None:
    """Return a graph that computes a count from the inputs of `gm`; None if the count needs more than inputs."""
    nodes = [operand for operand in operands.given if isinstance(operand, fx.Node)]
    reads = ValueReads(gm)
    # Return early for most nodes: they have no divisor, or a divisor that depends on weights.
    if not nodes or any(map(reads.uses_weights, nodes)):
        return None
    needed = _add_writes(gm, reads, reads.list_ancestors(nodes))
    if any(map(reads.uses_weights, needed)) or not any(node.op == "placeholder" for node in needed):
        return None
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node in needed or node.op == "placeholder":
            copied[node] = reads.copy(graph, node, copied)
    # forward() may write to its arguments, and these are the caller's.
    if any(_writes(node) for node in needed):
        for place in (n for n in needed if n.op == "placeholder"):
            with graph.inserting_after(copied[place]):
                clone = graph.call_method("clone", (copied[place],))
            copied[place].replace_all_uses_with(clone)
            clone.args = (copied[place],)  # its own argument was replaced too
    made = [graph.get_attr(o) if isinstance(o, str) else fx.map_arg(o, copied.__getitem__) for o in operands.given]
    graph.output(made[0] if operands.function is None else graph.call_function(operands.function, tuple(made)))
    return fx.GraphModule(gm, graph)


def _describe(operands: Operands) -> str:
    """Return a text that is equal for operands that are computed alike."""
    # By hashes, since the full text may be as long as all paths through the graph together.
    found: dict[fx.Node, str] = {}

    def describe(value: Any) -> str:
        return str(fx.node.map_aggregate(value, lambda leaf: found[leaf] if isinstance(leaf, fx.Node) else repr(leaf)))

    for node in sorted(list_ancestors([given for given in operands.given if isinstance(given, fx.Node)])):
        text = f"{node.op} {node.target} {describe(node.args)} {describe(node.kwargs)}"
        found[node] = sha256(text.encode()).hexdigest()
    return f"{operands.function} {describe(tuple(operands.given))}"


def _find_operands(gm: fx.GraphModule, node: fx.Node) -> Operands:
    """Return the operands of the count that a node divides by.

    The operands are a divisor, or labels, weight and ignore_index, or a mask. They are empty for a node without a
    divisor.
    """
    name = read_name(node)
    if node.op == "call_module":
        return _read_module(gm, node)
    if node.target in (*LABEL_FUNCTIONS, *LABEL_OPERATORS):
        return _read_call(node)
    if name in DIVISIONS and len(node.args) == 2 and not node.kwargs:
        # The factor 1 / count is rounded, so the exact divisor of the product is the inverse of this factor.
        return Operands(node.args[1:]) if isinstance(node.args[0], fx.Node) else Operands([node], divide_one_by)
    if name == "reciprocal" or (name == "pow" and node.args[1:] == (-1,)):
        return Operands([node], divide_one_by)
    if name == "mean" or name.endswith("_loss") or name.startswith("binary_cross_entropy"):
        return _find_selection(gm, node)
    return Operands(())


def _find_selection(gm: fx.GraphModule, node: fx.Node) -> Operands:
    """Return the mask, or the indices, that select the entries of a mean; empty for a mean over all entries."""
    masks: dict[str, Operands] = {}
    waiting, seen = node.all_input_nodes, set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen or is_weight(gm, node):
            continue
        seen.add(node)
        places = _list_places(node)
        if places:
            operands = Operands(places, count_selected)
            masks[_describe(operands)] = operands
        else:
            waiting += node.all_input_nodes
    return next(iter(masks.values())) if len(masks) == 1 else Operands(())


def _list_places(node: fx.Node) -> list[fx.Node]:
    """Return the masks and indices by which a node selects entries of a tensor; empty for any other node."""
    if read_name(node) not in SELECTIONS:
        return []
    # Leave slices out: the number of entries that a slice takes from a row does not depend on the row's values.
    given = pytree.tree_leaves([*node.args[1:], *node.kwargs.values()])
    return [place for place in given if isinstance(place, fx.Node)]


def _read_module(gm: fx.GraphModule, node: fx.Node) -> Operands:
    """Return labels, weight and ignore_index of a call of a loss module; empty for any other module."""
    loss = gm.get_submodule(str(node.target))
    is_loss = type(loss).__module__ == nn.L1Loss.__module__
    if not is_loss or loss.reduction != "mean" or len(node.args) != 2:
        return Operands(())
    if type(loss) not in LABEL_MODULES:
        return _find_selection(gm, node)
    given = node.args[1], None if loss.weight is None else f"{node.target}.weight", loss.ignore_index
    return Operands(given, count_labels)


def _read_call(node: fx.Node) -> Operands:
    """Return labels, weight and ignore_index of a call of a loss function; empty if the loss is not a mean."""
    if node.target in LABEL_OPERATORS:
        # They have their reduction, a number, before `ignore_index`, and none of the older options.
        names = ("input", "target", "weight", "reduction", "ignore_index")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    else:
        given = read_options(node.args, node.kwargs)
    made = given.get("target"), given.get("weight"), given.get("ignore_index", -100)
    return Operands(made, count_labels) if is_mean(given) else Operands(())


def _add_writes(gm: fx.GraphModule, reads: ValueReads, needed: set[fx.Node]) -> set[fx.Node]:
    """Return `needed` with all nodes that write to a needed node, and the nodes from which these are computed."""
    writes = {node: list_ancestors([node.all_input_nodes[0]]) for node in gm.graph.nodes if _writes(node)}
    while True:
        # The target of a write may be a view of a needed node. It is then computed from nodes of the same type.
        more = [w for w, made_of in writes.items() if w not in needed and _may_be_view(w, made_of & needed)]
        if not more:
            return needed
        needed = needed | reads.list_ancestors(more)


def _may_be_view(write: fx.Node, nodes: set[fx.Node]) -> bool:
    """Return whether a write may change one of `nodes`, from which the target of the write is computed."""
    kind = read_dtype(write.all_input_nodes[0])
    return any(read_dtype(node) == kind for node in nodes)


def _writes(node: fx.Node) -> bool:
    """Return whether a node writes to its arguments, by torch's naming rule."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return False
    name = str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target)))
    inplace = bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return inplace or name in ("setitem", "iadd", "isub", "imul", "itruediv") or (name[-1:] == "_" != name[-2:-1])
