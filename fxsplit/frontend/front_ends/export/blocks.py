"""Blocks of an exported program: calls that run a part of the program under a mode, such as no_grad or autocast.

`with torch.no_grad(): y = x * 2` becomes `wrap_with_set_grad_enabled(False, submod_1, x)`: a node with a higher order
operator as its target. Its arguments are the options of the mode (`False`), the *body* (`submod_1`, a GraphModule), and
the values of the body's placeholders.

A vmap is a block too. In a program it is a sequence of nodes, from a node that begins the vmap to a node that ends it.
These nodes are cut out, and become a body.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

aten = torch.ops.aten
VMAPS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}
"""The functions that begin and end a vmap, and the change that they make to the depth of vmaps."""


class Region(nn.Module):
    """A block as a module, which runs the block's body under the block's mode. Graphs call it."""

    def __init__(self, block: Callable[..., Any], options: Sequence[Any], body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body
        self._block = block
        self.options = tuple(options)

    def forward(self, *values: Any) -> Any:
        """Return the output of the body."""
        return self._block(*self.options, self.body, *values)


def is_block(node: Any) -> bool:
    """Return whether a node calls a block; a higher order operator without a body is an ordinary operator."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    program = node.graph.owning_module
    return program is not None and any(isinstance(a, fx.Node) and _fetches_body(program, a) for a in node.args)


def find_body(program: fx.GraphModule, block: fx.Node) -> tuple[int, fx.GraphModule]:
    """Return the position of the body among the arguments of a block in `program`, and the body."""
    # Not always the first: the options of the mode come before it, and their number differs by block.
    position = next(i for i, a in enumerate(block.args) if isinstance(a, fx.Node) and _fetches_body(program, a))
    return position, operator.attrgetter(str(block.args[position].target))(program)  # type: ignore[union-attr]


def can_be_inlined(options: Sequence[Any], body: fx.GraphModule) -> bool:
    """Return whether a block for the grad mode only disables gradients, writes nothing, and has no inner blocks.

    The nodes of such a block, with detached results, compute the same as the block. A write under no_grad would not:
    autograd must not see the write.
    """
    nodes = list(body.graph.nodes)
    nested = any(n.op == "get_attr" and _fetches_body(body, n) for n in nodes)
    return tuple(options) == (False,) and not nested and not any(writes(n) for n in nodes)


def writes(node: fx.Node) -> bool:
    """Return whether a node of an exported program writes to memory, according to its operator."""
    # Their schemas do not mention that they write running statistics; argument 5 is `training`.
    if node.target in (aten.batch_norm.default, aten.instance_norm.default):
        return bool(node.args[5])
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def find_vmaps(program: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Return the nodes of each outermost vmap of a program, from begin to end, by the node that begins the vmap."""
    found: dict[fx.Node, list[fx.Node]] = {}
    begin, depth = None, 0
    for node in program.graph.nodes:
        change = VMAPS.get(getattr(node.target, "__name__", ""), 0) if node.op == "call_function" else 0
        if change > 0 and not depth:
            begin = node
            found[begin] = []
        depth += change
        if begin is not None and (depth or change):
            found[begin].append(node)
    return found


def cut_out(program: fx.GraphModule, nodes: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Copy some nodes of a program into a graph of their own, a body. Return (body, inputs, outputs).

    inputs: the program's nodes whose values the body takes, one for each of its placeholders. outputs: the nodes whose
    values the body returns. Attributes that are no tensors, such as inner bodies, are not inputs: the body fetches
    them.
    """
    inside, graph = set(nodes), fx.Graph()
    read = dict.fromkeys(value for node in nodes for value in node.all_input_nodes)
    fetched = {v: operator.attrgetter(str(v.target))(program) for v in read if v.op == "get_attr"}
    held = {value: found for value, found in fetched.items() if not isinstance(found, Tensor)}
    given = [value for value in read if value not in held and (value in fetched or value not in inside)]
    copies = {value: graph.placeholder(value.name) for value in given}
    copies |= {value: graph.get_attr(value.name) for value in held}
    for node in nodes:
        if node.op != "get_attr":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = [node for node in nodes if node.op != "get_attr" and not inside.issuperset(node.users)]
    graph.output(tuple(copies[node] for node in returned))
    return fx.GraphModule({value.name: found for value, found in held.items()}, graph), given, returned


def _fetches_body(program: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node fetches the body of a block."""
    return node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(program), fx.GraphModule)
