"""The second front end for a model that makes its number of rows a constant: one export for each size of microbatch.

`b = int(y.shape[0] / windows)`, as in Swin's own window code, is a number in an exported graph, and the graph is only
right for that number of rows. A batch of 7 rows has microbatches of 4 and 3, so there are two exports. They have the
same nodes but different numbers. So they become one graph, which looks up each number by the number of rows:

    for 4 rows:  view = aten.view(x, [4, 16, 8])        rows = aten.sym_size(in_0, 0)
    for 3 rows:  view = aten.view(x, [3, 16, 8])        number = {4: 4, 3: 3}[rows]
                                                        view = aten.view(x, [number, 16, 8])
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxsplit.errors import TraceError
from fxsplit.frontend.front_ends.export.blocks import Region
from fxsplit.frontend.graph import FrontEnd, Graph, find_line, find_submodule, list_fetched, same_constant, same_graph
from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.call import Inputs

aten = torch.ops.aten
Guard = Callable[..., Any]


class OtherGraph(TraceError):
    """The exports for several sizes of microbatches are graphs that cannot be merged."""


@dataclass(frozen=True)
class FixedRows:
    """Exports a model once for each size of its microbatches, and merges the exports into one graph.

    export: the front end that makes each export.
    """

    export: FrontEnd
    name: str = "export, rows fixed"

    def attempt(self, subject: Subject) -> Graph:
        """Return the graph for all sizes of the subject's microbatches.

        Raises TraceError if torch.export cannot follow the model, and OtherGraph if forward() takes different branches
        for different sizes.
        """
        sizes = subject.sizes
        graphs = [self.export.attempt(replace(subject, rows=size)) for size in sizes]
        first, *others = graphs
        scope = replace(first.scope, front_end=self.name)
        if not others:
            return replace(first, scope=scope)
        gm = _Merge(subject, sizes, graphs).write()
        guards = {size: graph.scope.guard for size, graph in zip(sizes, graphs, strict=True)}
        scope = replace(scope, bounds=(min(sizes), max(sizes)), guard=_join_guards(subject.inputs, guards))
        computed = first.computed.union(*(graph.computed for graph in others))
        return replace(first, gm=gm, scope=scope, computed=computed)


def _join_guards(inputs: Inputs, guards: Mapping[int, Guard | None]) -> Guard:
    """Return a guard that calls, of `guards`, the guard for the number of rows of the given tensors."""

    def guard(*tensors: Tensor) -> None:
        own = guards[inputs.count_rows(tensors)]
        if own is not None:
            own(*tensors)

    return guard


class _Merge:
    """Writes one graph from the graphs of one model for microbatches of different `sizes`."""

    def __init__(self, subject: Subject, sizes: Sequence[int], graphs: Sequence[Graph]) -> None:
        self._subject, self._sizes = subject, sizes
        self._gms = [graph.gm for graph in graphs]
        self._graph = fx.Graph()
        self._written: dict[fx.Node, fx.Node] = {}
        self._rows: fx.Node | None = None
        self._numbers: dict[tuple[Any, ...], fx.Node] = {}

    def write(self) -> fx.GraphModule:
        """Return the graph; raises TraceError, with the user's line, at the first node that differs."""
        columns = [list(gm.graph.nodes) for gm in self._gms]
        if len({len(column) for column in columns}) > 1:
            counts = ", ".join(f"{len(c)} nodes for {n} rows" for c, n in zip(columns, self._sizes, strict=True))
            raise self._make_error(f"it has {counts}", None)
        self._compare_fetched()
        for nodes in zip(*columns, strict=True):
            self._write_node(nodes)
            # After the last placeholder, and before any node that reads the number of rows.
            if self._rows is None and nodes[0].op == "placeholder" and nodes[0].next.op != "placeholder":
                self._rows = self._write_rows()
        return fx.GraphModule(self._gms[0], self._graph, class_name=self._subject.name)

    def _write_node(self, nodes: Sequence[fx.Node]) -> None:
        """Write one node. `nodes`: the node and its counterparts in the graphs of the other sizes."""
        first = nodes[0]
        if any(node.op != first.op or not _is_same_target(node.target, first.target) for node in nodes):
            names = ", ".join(f"{node.name!r} for {size} rows" for node, size in zip(nodes, self._sizes, strict=True))
            raise self._make_error(f"it has node {names}", first)
        if first.op == "call_module":
            own, *others = [gm.get_submodule(str(n.target)) for gm, n in zip(self._gms, nodes, strict=True)]
            # A block under a mode is a module of its own in each export, and the size may be a constant inside.
            if not all(other is own or _is_same_block(own, other) for other in others):
                raise self._make_error(f"node {first.name!r} is a block of a mode, with other numbers inside", first)
        args, kwargs = self._join([n.args for n in nodes], first), self._join([n.kwargs for n in nodes], first)
        written = self._graph.create_node(first.op, first.target, args, kwargs, first.name, first.type)
        written.meta = dict(first.meta)
        self._written.update(dict.fromkeys(nodes, written))

    def _write_rows(self) -> fx.Node:
        """Write the node that reads the number of rows, or a multiple of it, from the size of an input."""
        specs = self._subject.inputs.specs
        place, (dim, _) = next((i, spec.cut) for i, spec in enumerate(specs) if spec.cut.dim is not None)
        given = self._graph.find_nodes(op="placeholder")[place]
        return self._graph.call_function(aten.sym_size.int, (given, dim))

    def _join(self, values: Sequence[Any], node: fx.Node) -> Any:
        """Return the merged value of an argument of `node`. `values`: the argument in the graph of each size."""
        first = values[0]
        if all(isinstance(v, fx.Node) for v in values):
            if len({self._written[v] for v in values}) > 1:
                raise self._make_error(f"node {node.name!r} reads other nodes", node)
            return self._written[first]
        if any(type(v) is not type(first) for v in values):
            raise self._make_error(f"node {node.name!r} has {first!r} and {values[-1]!r} in one place", node)
        if isinstance(first, (tuple, list)) and len({len(v) for v in values}) == 1:
            return type(first)(self._join(parts, node) for parts in zip(*values, strict=True))
        if isinstance(first, dict) and all(v.keys() == first.keys() for v in values):
            return {key: self._join([v[key] for v in values], node) for key in first}
        if isinstance(first, slice):
            return slice(*(self._join([getattr(v, e) for v in values], node) for e in ("start", "stop", "step")))
        if all(v == first for v in values):
            return first
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            return self._look_up(values)
        raise self._make_error(f"node {node.name!r} has {first!r} and {values[-1]!r} in one place", node)

    def _look_up(self, numbers: Sequence[float]) -> fx.Node:
        """Return the node that looks up a number by the size of the present microbatch.

        `numbers`: the number for each size.
        """
        key = tuple(numbers)
        if key not in self._numbers:
            assert self._rows is not None, "placeholders have no other numbers"
            each = next(spec.cut.each for spec in self._subject.inputs.specs if spec.cut.dim is not None)
            table: Any = {size * each: number for size, number in zip(self._sizes, numbers, strict=True)}
            self._numbers[key] = self._graph.call_function(operator.getitem, (table, self._rows))
        return self._numbers[key]

    def _compare_fetched(self) -> None:
        """Raise TraceError for a constant of the graph that differs between sizes."""
        first, *others = (list_fetched(gm) for gm in self._gms)
        for other in others:
            for path, value in first.items():
                if path not in other or not same_constant(value, other[path]):
                    raise self._make_error(f"its constant {path!r} differs", None)

    def _make_error(self, what: str, node: fx.Node | None) -> OtherGraph:
        """Return the error for graphs that cannot be merged: `what` differs between them, first at `node`."""
        sizes = " and ".join(map(str, self._sizes))
        line = "" if node is None else find_line(node)
        return OtherGraph(
            f"the graph of {self._subject.name} differs for microbatches of {sizes} rows ({what}{line}), and "
            "its number of rows is a constant: give batches that n_microbatches divides, so that all microbatches have "
            "the same number of rows (a DataLoader's last batch: drop_last=True)",
            submodule=None if node is None else find_submodule(node),
        )


def _is_same_target(a: Any, b: Any) -> bool:
    """Return whether two nodes call the same target.

    Each export makes its own functions for calls of autograd.Functions, so these are compared by their contents.
    """
    if not callable(a) or not callable(b) or not hasattr(a, "held") or not hasattr(b, "held"):
        return bool(a == b)
    return (a.__module__, a.__qualname__, a.held) == (b.__module__, b.__qualname__, b.held)


def _is_same_block(a: nn.Module, b: nn.Module) -> bool:
    """Return whether two modules are blocks with the same body under the same options."""
    if not isinstance(a, Region) or not isinstance(b, Region) or a.options != b.options:
        return False
    bodies = a.body, b.body
    assert isinstance(bodies[0], fx.GraphModule) and isinstance(bodies[1], fx.GraphModule), "a region has a body"
    return same_graph(*bodies)
