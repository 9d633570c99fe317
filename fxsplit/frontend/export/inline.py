"""From an exported program to the graph that passes work on: with the model's names, and nothing that does nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fxsplit.errors import TraceError
from fxsplit.frontend.autograd_functions import enter, leave
from fxsplit.frontend.export.whole_modules import WholeCall, whole
from fxsplit.frontend.graph import find_submodule
from fxsplit.torch_internals import pytree

aten = torch.ops.aten
END = 2**63 - 1
"""Where a slice ends that goes to the end."""
ASSERTS = (aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg)
Held = dict[str, Any]
"""What a graph fetches and calls, by path."""


class Region(nn.Module):
    """Calls a part of an exported program under a mode that the program enters and leaves, such as autocast."""

    def __init__(self, region: Callable[..., Any], options: Sequence[Any], inside: fx.GraphModule) -> None:
        super().__init__()
        self.inside = inside
        self._region = region
        self._options = tuple(options)

    def forward(self, *values: Any) -> Any:
        """Return what the part returns."""
        return self._region(*self._options, self.inside, *values)


def inline_blocks(
    program: fx.GraphModule,
    model: nn.Module,
    inputs: Sequence[str],
    calls: Sequence[Callable[..., Any]],
    wholes: Sequence[WholeCall],
) -> tuple[fx.Graph, Held, list[Any]]:
    """Return the program's graph, without its output, with `inputs` as placeholders; what it fetches; what it returns.

    Parameters and buffers go by the first name that the model has for them, and each user fetches them itself. Blocks
    without gradients are inlined and their results detached; torch's batch norms are calls of the modules again, and
    `calls` of autograd.Functions are back between their marks, those of submodules that stay whole in their operators'
    place.
    """
    writer = _Writer(program, model, calls, wholes)
    placeholders = program.graph.find_nodes(op="placeholder")
    values = {node: writer.graph.placeholder(name) for node, name in zip(placeholders, inputs, strict=True)}
    returned = list(writer.write(program, values))
    _erase_idle(writer.graph, {v for v in returned if isinstance(v, fx.Node)})
    return writer.graph, writer.held, returned


class _Writer:
    """Writes one graph from a program and the parts in it."""

    def __init__(
        self,
        program: fx.GraphModule,
        model: nn.Module,
        calls: Sequence[Callable[..., Any]],
        wholes: Sequence[WholeCall],
    ) -> None:
        self.graph = fx.Graph()
        self.held: Held = {}
        self._model = model
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        self._whole = _batch_norms(program, model)
        self._regions = 0
        self._calls = calls
        self._entered: dict[int, list[Any]] = {}
        self._called: dict[int, fx.Node] = {}
        self._wholes = wholes
        self._submodules: dict[int, fx.Node] = {}

    def write(self, part: fx.GraphModule, values: Mapping[fx.Node, Any]) -> Sequence[Any]:
        """Write the nodes of a part, whose placeholders have `values`; return what it returns."""
        made = dict(values)
        for node in part.graph.nodes:
            if node.op == "output":
                found = node.args[0]
                return [made[v] if isinstance(v, fx.Node) and v in made else self._use(part, v) for v in found]
            if node.op in ("placeholder", "get_attr") or node.target in ASSERTS or node.name == "_guards_fn":
                continue  # what is fetched is fetched by each user

            def use(value: fx.Node) -> Any:
                return made[value] if value in made else self._use(part, value)

            made[node] = self._node(part, node, use)
        raise AssertionError("a part without an output")

    def _use(self, part: fx.GraphModule, value: Any) -> Any:
        """Return a node that fetches what `value` fetches; what is no node is returned as it is."""
        if not isinstance(value, fx.Node):
            return value
        assert value.op == "get_attr", value
        tensor = operator.attrgetter(str(value.target))(part)
        name = self._names.setdefault(id(tensor), f"constant_{len(self.held)}_{value.name}")
        self.held[name] = tensor
        fetched = self.graph.create_node("get_attr", name)
        fetched.meta = dict(value.meta)
        return fetched

    def _node(self, part: fx.GraphModule, node: fx.Node, use: Callable[[fx.Node], Any]) -> Any:
        """Write one node and return what has its value."""
        if node in self._whole:
            path = self._whole[node]
            if path is None:  # the count of batches, which the module counts itself
                return use(_counted(part, node))
            self.held[path] = self._model.get_submodule(path)
            written = self.graph.call_module(path, (use(node.args[0]),))  # type: ignore[arg-type]
            written.meta = dict(node.meta)
            return written
        if node.target is enter:
            self._entered.setdefault(node.args[1], []).append(use(node.args[0]))  # type: ignore[arg-type]
            return use(node.args[0])  # type: ignore[arg-type]
        if node.target is leave:
            return self._left(node)
        if node.target is whole:
            return self._whole_call(node, use)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._region(part, node, use)
        if node.target is operator.getitem and isinstance(values := use(node.args[0]), (tuple, list)):  # type: ignore[arg-type]
            return values[node.args[1]]  # type: ignore[index]
        if node.target is aten.slice.Tensor and node.args[2:] in ((0, END), (0, END, 1)):
            return use(node.args[0])  # type: ignore[arg-type]
        return self.graph.node_copy(node, use)

    def _region(self, part: fx.GraphModule, node: fx.Node, use: Callable[[fx.Node], Any]) -> Any:
        """Write a block under a mode: its nodes where it only goes without gradients, otherwise one call."""
        at, inside = _inside(part, node)
        options, given = node.args[:at], [fx.node.map_arg(a, use) for a in node.args[at + 1 :]]
        if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(options)):
            raise TraceError(
                f"forward() calls {node.target}, which decides by values, and a graph cannot hold it: keep the module "
                "that calls it whole, fxsplit.leaf('its.path')",
                submodule=find_submodule(node),
            )
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and _can_be_inlined(options, inside):
            values = dict(zip(inside.graph.find_nodes(op="placeholder"), given, strict=True))
            results = self.write(inside, values)
            known = {id(v) for v in given}
            return tuple(self._detached(v) if id(v) not in known else v for v in results)
        for part_inside in (m for m in inside.modules() if isinstance(m, fx.GraphModule)):
            if marked := next((n for n in part_inside.graph.nodes if n.target is enter), None):
                name = self._calls[marked.args[1]].__name__
                raise TraceError(
                    f"{name} is an autograd.Function called in a block of autocast or without gradients, in which an "
                    "exported graph loses its backward: keep the module that calls it whole, fxsplit.leaf('its.path')"
                )
            if kept := next((n for n in part_inside.graph.nodes if n.target is whole), None):
                call = self._wholes[kept.args[4]]
                raise TraceError(
                    f"submodule {call.path!r} is called in a block of autocast, or of no_grad that writes, and such a "
                    "block is one call in a graph: keep a module around it whole",
                    submodule=call.around,
                )
            for idle in [n for n in part_inside.graph.nodes if n.target in ASSERTS]:
                part_inside.graph.erase_node(idle)
            part_inside.recompile()
        self._regions += 1
        name = f"region_{self._regions}"
        self.held[name] = Region(node.target, options, inside)  # type: ignore[arg-type]
        call = self.graph.call_module(name, tuple(given))
        call.meta = dict(node.meta)
        return call

    def _left(self, node: fx.Node) -> fx.Node:
        """Return an output of a call that was marked; what torch.export saw inside of it is idle."""
        _, number, output = node.args
        assert isinstance(number, int) and isinstance(output, int)
        if number not in self._called:
            self._called[number] = self.graph.call_function(self._calls[number], tuple(self._entered[number]))
            self._called[number].meta = dict(node.meta)
        return self.graph.call_function(operator.getitem, (self._called[number], output))

    def _whole_call(self, node: fx.Node, use: Callable[[fx.Node], Any]) -> fx.Node:
        """Return an output of a call of a submodule that stays whole."""
        given, _, _, _, number, output = node.args
        assert isinstance(number, int) and isinstance(output, int)
        call = self._wholes[number]
        if number not in self._submodules:
            self.held[call.path] = self._model.get_submodule(call.path)
            self._submodules[number] = call.write(self.graph, [use(v) for v in given])  # type: ignore[union-attr, arg-type]
            self._submodules[number].meta = dict(node.meta)
        return call.output(self.graph, self._submodules[number], output)

    def _detached(self, value: Any) -> Any:
        """Return the value without a gradient."""
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor):
            return value
        made = self.graph.call_function(aten.detach.default, (value,))
        made.meta = dict(value.meta)
        return made


def _is_part(program: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node fetches a part of the program."""
    return node.op == "get_attr" and isinstance(operator.attrgetter(str(node.target))(program), fx.GraphModule)


def _inside(program: fx.GraphModule, block: fx.Node) -> tuple[int, Any]:
    """Return which argument of a block is the part it runs, and that part."""
    at = next(i for i, a in enumerate(block.args) if isinstance(a, fx.Node) and _is_part(program, a))
    return at, operator.attrgetter(str(block.args[at].target))(program)  # type: ignore[union-attr]


def _can_be_inlined(options: Sequence[Any], inside: fx.GraphModule) -> bool:
    """Return whether a block only goes without gradients, and neither writes nor enters other blocks."""
    nodes = list(inside.graph.nodes)
    deeper = any(n.op == "get_attr" and _is_part(inside, n) for n in nodes)
    return tuple(options) == (False,) and not deeper and not any(writes(n) for n in nodes)


def writes(node: fx.Node) -> bool:
    """Return whether a node of an exported program writes to memory, as far as its operator says."""
    if node.target in (aten.batch_norm.default, aten.instance_norm.default):
        return bool(node.args[5])  # running statistics, which the schema keeps to itself
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _batch_norms(program: fx.GraphModule, model: nn.Module) -> dict[fx.Node, str | None]:
    """Return the nodes that are torch's own batch norm modules, with their paths; None for what counts their batches.

    As modules they can be deferred, and written by replicas in order.
    """
    calls: dict[str, list[fx.Node]] = {}
    counts: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.target is aten.batch_norm.default and isinstance(node.args[3], fx.Node):
            calls.setdefault(str(node.args[3].target).removesuffix(".running_mean"), []).append(node)
        elif node.target is aten.add_.Tensor:
            counted = _counted(program, node)
            if str(counted.target).endswith("num_batches_tracked"):
                counts.setdefault(str(counted.target).removesuffix(".num_batches_tracked"), []).append(node)
    whole: dict[fx.Node, str | None] = {}
    for path, nodes in calls.items():
        parent = next((m for name, m in model.named_modules(remove_duplicate=False) if name == path), None)
        hooked = parent is not None and any(held for key, held in parent.__dict__.items() if "_hooks" in key)
        if isinstance(parent, _BatchNorm) and type(parent).forward is _BatchNorm.forward and not hooked:
            whole |= dict.fromkeys(nodes, path)
            whole |= dict.fromkeys(counts.get(path, ()))
    return whole


def _counted(program: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return what is counted on by a node: the second call of a layer counts on, also one after a block's."""
    while True:
        above: Any = node.args[0] if node.args else None
        if node.target is aten.add_.Tensor and isinstance(above, fx.Node):
            node = above
        elif node.target is operator.getitem and isinstance(above.target, torch._ops.HigherOrderOperator):
            at, inside = _inside(program, above)
            result: Any = inside.graph.output_node().args[0][node.args[1]]
            placeholders = inside.graph.find_nodes(op="placeholder")
            begin = _counted(inside, result) if isinstance(result, fx.Node) else result
            if begin not in placeholders:
                return node
            node = above.args[at + 1 + placeholders.index(begin)]
        else:
            return node


def _erase_idle(graph: fx.Graph, returned: set[fx.Node]) -> None:
    """Erase nodes that nobody reads and that write nothing."""
    for node in reversed(list(graph.nodes)):
        idle = not node.users and node not in returned and not writes(node)
        if idle and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)
