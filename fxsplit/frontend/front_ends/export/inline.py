"""Write the graph that passes work on, from the program of torch.export.

In a program all modules are taken apart into operators of aten, and each weight is fetched once for all its users:

    h = self.a(x)                              a_weight = get_attr a.weight             and so on for each weight
    with torch.no_grad():                      in_0 = placeholder
        scale = torch.softmax(h, -1)           linear = aten.linear(in_0, a_weight, a_bias)
    return self.norm(h) * scale                block = wrap_with_set_grad_enabled(False, submod_1, linear)
                                               getitem = getitem(block, 0)
                                               add_ = aten.add_(norm_num_batches_tracked, 1)
                                               batch_norm = aten.batch_norm(linear, norm_weight, norm_bias, ...)
                                               mul = aten.mul(batch_norm, getitem)

`submod_1` is a GraphModule, the block's body. The graph written from this program computes the same:

    x = placeholder                            named for the call's argument
    a_weight = get_attr a.weight               each user of a weight fetches it, in its own stage
    linear = aten.linear(x, a_weight, a_bias)
    softmax = aten.softmax(linear, -1)         the body's nodes
    detach = aten.detach(softmax)              the block's result has no gradient
    norm = call_module norm(linear)            torch's batch norms are modules, which count batches themselves
    mul = aten.mul(norm, detach)

A block under another mode, such as autocast, becomes one call of a module, and so does a vmap. Marks around the calls
of an autograd.Function (`autograd_functions`) become a call of the function. Operators in place of a submodule that
stays whole (`whole_modules`) become a call of the submodule.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.autograd_functions import enter, leave
from fxsplit.frontend.front_ends.export.batch_norms import find_batch_norms, find_counter
from fxsplit.frontend.front_ends.export.blocks import (
    Region,
    can_be_inlined,
    cut_out,
    find_body,
    find_vmaps,
    is_block,
    writes,
)
from fxsplit.frontend.front_ends.export.whole_modules import WholeCall, whole
from fxsplit.frontend.graph import find_submodule
from fxsplit.ir.facts.capture.numbers import list_number_nodes
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.vmap import run_vmap

aten = torch.ops.aten
END = 2**63 - 1
"""The end of a slice that goes to the end of a dimension."""
ASSERTS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default)
"""Operators that check the dtypes and sizes of the example. The pipeline checks these itself at each call."""
IDLE = (*ASSERTS, "_guards_fn")
"""Nodes that are left out of the graph. Guards run once for each number of rows, and not at each call."""
VALUE_ASSERTS = (aten._assert_async.default, aten._assert_async.msg)
"""Operators that check a tensor's values. The model checks them at each call, and so does the graph."""
UNWRAPS = (aten.item.default, aten._local_scalar_dense.default)
"""Operators that make a Python number of a tensor."""
Calls = Sequence[Callable[..., Any]]
WholeCalls = Sequence[WholeCall]
Use = Callable[[Any], Any]
"""From a node of the program: the node that stands for the same value in the written graph."""


class GraphWriter:
    """Writes `graph` from a program and the bodies of its blocks. `held`: the attributes that the graph uses.

    model: the exported model.
    functions: the marked calls of autograd.Functions, by the number in their marks.
    wholes: the calls of submodules that stay whole, by the number in their operators.
    """

    def __init__(self, program: fx.GraphModule, model: nn.Module, functions: Calls, wholes: WholeCalls) -> None:
        self.graph = fx.Graph()
        self.held: dict[str, Any] = {}
        self._program, self._model = program, model
        # A tied weight has several names, and is called by the first name that the model has for it.
        self._names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._batch_norms = find_batch_norms(program, model)
        self._functions, self._wholes = functions, wholes
        self._entered: dict[int, list[Any]] = defaultdict(list)  # the arguments of each marked call
        self._called: dict[tuple[Any, int], fx.Node] = {}  # the call that several marks or operators represent

    def write_program(
        self, inputs: Sequence[str], returns: pytree.TreeSpec, numbers: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Write the whole graph. Raises TraceError for a block that a graph cannot hold.

        inputs: the names of the graph's placeholders. returns: the structure of its output.
        numbers: further placeholders with their defaults; the program has them as tensors.
        """
        placeholders = self._program.graph.find_nodes(op="placeholder")
        written = [self.graph.placeholder(name) for name in inputs]
        written += [self.graph.placeholder(name, default_value=value) for name, value in numbers.items()]
        values = dict(zip(placeholders, written, strict=True))
        self.graph.output(pytree.tree_unflatten(self.write(self._program, values), returns))
        # This removes fetches of weights that batch norm modules read themselves, and operators between marks.
        self.graph.eliminate_dead_code(_is_needed_unused)

    def write(self, body: fx.GraphModule, values: Mapping[fx.Node, Any]) -> list[Any]:
        """Write the nodes of a program or of a block's body, and return its outputs.

        `values`: the values of its placeholders.
        """
        written = dict(values)

        def use(value: Any) -> Any:
            # Each user fetches a weight itself: a fetch that two stages share would tie them together.
            return written[value] if value in written else self._fetch(body, value)

        vmaps = find_vmaps(body)
        inside = {node for nodes in vmaps.values() for node in nodes}
        for node in body.graph.nodes:
            if node in vmaps:
                written |= self._write_vmap(body, vmaps[node], use)
            elif node.op.startswith("call") and node not in inside and node.target not in IDLE:
                written[node] = self._write_node(body, node, use)
        returned: Any = body.graph.output_node().args[0]
        return [use(v) if isinstance(v, fx.Node) else v for v in returned]

    def _fetch(self, body: fx.GraphModule, value: fx.Node) -> fx.Node:
        """Return a new node that fetches the same attribute as `value`."""
        assert value.op == "get_attr", value
        tensor = operator.attrgetter(str(value.target))(body)
        name = self._names.setdefault(id(tensor), f"constant_{len(self.held)}_{value.name}")
        self.held[name] = tensor
        return _copy_meta(self.graph.create_node("get_attr", name), value)

    def _write_node(self, body: fx.GraphModule, node: fx.Node, use: Use) -> Any:
        """Write the operator of one node of `body` into the graph, and return the written node.

        use: returns the written node for a node of the body that was written before.
        """
        args: Any = node.args
        if node in self._batch_norms:
            path = self._batch_norms[node]
            if path is None:  # counts batches, as the module will do itself
                return use(find_counter(body, node))
            self.held[path] = self._model.get_submodule(path)
            return _copy_meta(self.graph.call_module(path, (use(args[0]),)), node)
        if node.target is enter:
            self._entered[args[1]].append(use(args[0]))
            return use(args[0])
        # The operators between the marks are written too, and removed at the end as unused.
        if node.target is leave:
            return self._write_function(node, args[1], args[2])
        if node.target is whole:
            return self._write_whole(node, use)
        if is_block(node):
            return self._write_block(body, node, use)
        # An inlined block returns a tuple of nodes, so its results are picked here and not in the graph.
        if node.target is operator.getitem and isinstance(values := use(args[0]), (tuple, list)):
            return values[args[1]]
        # The program unwraps a number, but the graph gets the plain number.
        if node.target in UNWRAPS and use(args[0]) in list_number_nodes(self.graph):
            return use(args[0])
        if node.target is aten.slice.Tensor and args[2:] in ((0, END), (0, END, 1)):  # x[:]
            return use(args[0])
        return self.graph.node_copy(node, use)

    def _write_block(self, body: fx.GraphModule, node: fx.Node, use: Use) -> Any:
        """Write a block: as its own nodes if it only disables gradients, otherwise as one call of a module."""
        position, inside = find_body(body, node)
        options, given = node.args[:position], [fx.node.map_arg(a, use) for a in node.args[position + 1 :]]
        if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(options)):
            raise TraceError(
                f"forward() calls {node.target}, which decides by values, and a graph cannot hold it: keep the module "
                "that calls it whole, fxsplit.leaf('its.path')",
                submodule=find_submodule(node),
            )
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and can_be_inlined(options, inside):
            results = self.write(inside, dict(zip(inside.graph.find_nodes(op="placeholder"), given, strict=True)))
            # A value that the block only passes through keeps its gradient.
            known = {id(v) for v in given}
            return tuple(v if id(v) in known else self._detach(v) for v in results)
        return self._write_region(node, Region(node.target, options, inside), given)  # type: ignore[arg-type]

    def _write_vmap(self, body: fx.GraphModule, nodes: Sequence[fx.Node], use: Use) -> dict[fx.Node, Any]:
        """Write a vmap as one call of a module. Returns the written node for each of its nodes that is read outside."""
        inside, given, returned = cut_out(body, nodes)
        call = self._write_region(nodes[0], Region(run_vmap, (), inside), [use(value) for value in given])
        results = (self.graph.call_function(operator.getitem, (call, i)) for i in range(len(returned)))
        return {node: _copy_meta(result, node) for node, result in zip(returned, results, strict=True)}

    def _write_region(self, node: fx.Node, region: Region, given: Sequence[Any]) -> fx.Node:
        """Write the block that begins at `node` as one call of a module."""
        for part in (m for m in region.modules() if isinstance(m, fx.GraphModule)):
            self._refuse_calls(part)
            # Asserts name the device of the capture, and a stage may be on another one.
            for idle in [n for n in part.graph.nodes if n.target in ASSERTS]:
                part.graph.erase_node(idle)
            part.recompile()
        name = f"region_{1 + sum(isinstance(held, Region) for held in self.held.values())}"
        self.held[name] = region
        return _copy_meta(self.graph.call_module(name, tuple(given)), node)

    def _refuse_calls(self, body: fx.GraphModule) -> None:
        """Raise TraceError if the body of a block calls an autograd.Function, or a submodule that stays whole.

        The block becomes one call of a module, so a call inside it could not become a node of the graph.
        """
        for node in body.graph.nodes:
            args: Any = node.args
            if node.target is enter:
                raise TraceError(
                    f"{self._functions[args[1]].__name__} is an autograd.Function called in a block of autocast or "
                    "without gradients, in which an exported graph loses its backward: keep the module that calls it "
                    "whole, fxsplit.leaf('its.path')"
                )
            if node.target is whole:
                call = self._wholes[args[4]]
                raise TraceError(
                    f"submodule {call.path!r} is called in a block of autocast, vmap, or no_grad that writes, and "
                    "such a block is one call in a graph: keep a module around it whole",
                    submodule=call.around,
                )

    def _write_function(self, node: fx.Node, number: int, output: int) -> fx.Node:
        """Return the node of an output of the marked call `number` of an autograd.Function. `node`: the output's mark.

        The operators between the marks, which torch.export has seen inside the call, become unused.
        """
        if (leave, number) not in self._called:
            call = self.graph.call_function(self._functions[number], tuple(self._entered[number]))
            self._called[leave, number] = _copy_meta(call, node)
        return self.graph.call_function(operator.getitem, (self._called[leave, number], output))

    def _write_whole(self, node: fx.Node, use: Use) -> fx.Node:
        """Write the call of a submodule that stays whole, unless it is written already.

        Returns the node of one of its outputs.
        node: the node of this output in the exported graph.
        """
        given, _, _, _, number, output = node.args
        assert isinstance(given, Sequence) and isinstance(number, int) and isinstance(output, int)
        call = self._wholes[number]
        if (whole, number) not in self._called:
            self.held[call.path] = self._model.get_submodule(call.path)
            self._called[whole, number] = _copy_meta(call.write(self.graph, [use(v) for v in given]), node)
        return call.write_output(self._called[whole, number], output)

    def _detach(self, value: Any) -> Any:
        """Add a node that detaches the value of a tensor's node, and return it. Return any other value as it is."""
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor):
            return value
        return _copy_meta(self.graph.call_function(aten.detach.default, (value,)), value)


def _copy_meta(written: fx.Node, node: fx.Node) -> fx.Node:
    """Give a written node the metadata of its original: its module, its line, its shape. Return it."""
    written.meta = dict(node.meta)
    return written


def _is_needed_unused(node: fx.Node) -> bool:
    """Return whether a node stays in the graph even if nothing reads its value."""
    return node.op not in ("call_function", "get_attr") or writes(node) or node.target in VALUE_ASSERTS
