"""Find the count that a loss is divided by, from the torch calls of its function.

The result is a graph that needs only the target. A masked mean written by hand, such as
`(losses * mask).sum() / mask.sum()`, equals that of the whole batch if microbatches are weighted by their counts. The
function is called once, and each call of torch in it becomes a node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fxsplit.frontend.meanings.counts import find_count, is_safe
from fxsplit.frontend.meanings.stand_ins import list_ancestors, read_name
from fxsplit.ir.facts.capture.counts import Count
from fxsplit.torch_internals import pytree
from fxsplit.torch_internals.fx.interpret import describe_tensor
from fxsplit.torch_internals.nn.expectations import expect_averages
from fxsplit.torch_internals.thread_modes import enter_function_mode

REFLECTED = {
    "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv,
    "__rsub__": operator.sub,
    "__rpow__": operator.pow,
}
"""Methods of tensors that get the left operand as their second argument, with the functions that they stand for."""
EQUALITIES = {"eq", "ne", "isin", "__eq__", "__ne__"}
ORDERS = {"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "bucketize", "clamp", "clip"}
TABLES = {"getitem", "index_select", "take", "embedding"}
"""Names of functions that look up entries of a tensor, which may be a table of weights by class."""
LEAVING = {"numpy", "tolist", "item", "__array__", "__int__", "__float__", "__index__"}
"""Functions whose result is not a tensor, by name. Later comparisons with the result are not recorded."""
USUAL_MARKS = (-100, -1, 0)
NAN_ASKED = {"isnan", "isfinite", "nan_to_num", "nansum", "nanmean"}
MOST_MARKS = 16
"""How many of the numbers with which the target is compared are tried as its entries, at most."""


class LossCounts(NamedTuple):
    """The possible divisors of a loss, not tried out yet, and the *marks*: numbers that may decide what counts.

    counts: each is the divisor of a sum, or of a mean over rows.
    marks: numbers with which the loss compares entries of the target, such as an ignored label.
    """

    counts: Sequence[Count] = ()
    marks: Sequence[float] = ()


def find_loss_counts(loss_fn: Callable[..., Any], outputs: Any, target: tuple[Any, ...]) -> LossCounts:
    """Call `loss_fn` once; return the possible divisors of its loss, and the marks of this target."""
    record = Record(pytree.tree_leaves(outputs), pytree.tree_leaves(target))
    with expect_averages(), enter_function_mode(record):
        loss = loss_fn(outputs, *target)
    marks = list(dict.fromkeys(record.list_marks()))[:MOST_MARKS]
    # If a call does not fit into a graph there is no count. The trial then finds out whether microbatches make the
    # loss.
    with suppress(Exception):
        graph = record.find_count(loss)
        if graph is not None:
            return LossCounts([*_make_counts(graph)], marks)
    return LossCounts((), marks)


def _make_counts(graph: fx.GraphModule) -> Iterator[Count]:
    """Yield the two counts that a graph may compute: the divisor of a sum, and the divisor of a mean over rows."""
    reads = tuple(tensor for tensor in graph.buffers() if tensor.numel())

    def compute(target: Any) -> Any:
        # forward() instead of a call of the module, since that would print failing code.
        return graph.forward(*(leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)))

    for by_rows in (False, True):
        yield Count(compute, by_rows, safe=is_safe(graph) and not by_rows, reads=reads, additive=False)


class Record(TorchFunctionMode):
    """Records each call of torch as a node of a graph, with the tensors of a target as inputs.

    Outputs of the model become parameters of this graph, since a count must not depend on them: it must be known before
    the outputs are. All other tensors become buffers.
    """

    def __init__(self, outputs: Sequence[Any], target: Sequence[Any]) -> None:
        super().__init__()
        self._root, self._graph = nn.Module(), fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._leaves_torch = False
        self._kept: list[Tensor] = []  # keeps tensors alive, so that no new tensor gets the id of one of them
        for i, leaf in enumerate(leaf for leaf in target if isinstance(leaf, Tensor)):
            self._note(leaf, self._graph.placeholder(f"target_{i}"))
        for leaf in outputs:
            if isinstance(leaf, Tensor) and id(leaf) not in self._nodes:
                self._note(leaf, self._fetch(nn.Parameter(leaf.detach(), requires_grad=False)))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and record it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        self._leaves_torch |= name in LEAVING and self._follows_from_target(self._find(args[0]))
        with suppress(Exception):  # without its node, the result counts as a tensor from outside
            self._record(function, args, kwargs, result)
        return result

    def find_count(self, loss: Any) -> fx.GraphModule | None:
        """Return a graph that computes the loss's divisor from the target, or None."""
        node = self._nodes.get(id(loss))
        if node is None:
            return None
        self._graph.output(node)
        return find_count(fx.GraphModule(self._root, self._graph), node)

    def list_marks(self) -> Iterator[float]:
        """Yield numbers that may decide whether an entry of the target counts.

        These are numbers with which the target is compared, and the classes with the smallest and largest entries in
        tables.
        """
        for node in list(self._graph.nodes):
            name = read_name(node).strip("_")
            if not self._follows_from_target(node):
                continue
            if name in NAN_ASKED:
                yield float("nan")
            for number in self._list_numbers(node) if name in EQUALITIES | ORDERS else ():
                yield number
                if name in ORDERS:
                    yield from (number - 1, number + 1)
            if name in TABLES:
                yield from (place for table in self._list_tables(node) for place in _find_extremes(table))
        if self._leaves_torch:
            yield from USUAL_MARKS

    def _follows_from_target(self, node: fx.Node) -> bool:
        """Return whether a node is computed from the target."""
        return any(n.op == "placeholder" for n in list_ancestors([node]))

    def _list_numbers(self, node: fx.Node) -> Iterator[float]:
        """Yield the numbers among the arguments of a node, including the entries of small tensors."""
        for value in pytree.tree_leaves([node.args, node.kwargs]):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield value
            elif isinstance(value, fx.Node) and value.op == "call_function" and not value.all_input_nodes:
                yield from self._list_numbers(value)  # a tensor that is made of numbers
            elif isinstance(value, fx.Node) and value.op == "get_attr":
                tensor = getattr(self._root, str(value.target))
                if not isinstance(tensor, nn.Parameter) and tensor.numel() <= MOST_MARKS:
                    yield from tensor.flatten().tolist()

    def _list_tables(self, node: fx.Node) -> Iterator[Tensor]:
        """Yield the constants that a node of the loss reads, and that may be the weights of classes."""
        for value in node.all_input_nodes:
            table = getattr(self._root, str(value.target)) if value.op == "get_attr" else None
            if table is not None and not isinstance(table, nn.Parameter) and table.ndim == 1 and table.numel():
                yield table

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Add a node for a call that makes tensors, or writes to one."""
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not tensors and result is not None:
            return
        given = pytree.tree_map_only(Tensor, self._find, (args, kwargs))
        node = self._call(function, *given)
        if isinstance(result, Tensor):
            self._note(result, node)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._note(part, self._graph.call_function(operator.getitem, (node, i)))

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Return a node that calls a function, or a method of tensors by its name."""
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._graph.call_function(getattr, (args[0], function.__self__.__name__))
        if getattr(function, "__module__", None) not in (None, "torch._tensor"):
            return self._graph.call_function(function, args, kwargs)
        if name in REFLECTED:
            return self._graph.call_function(REFLECTED[name], (args[1], args[0]))
        if name.startswith("__"):
            return self._graph.call_function(getattr(operator, name), args)
        if name in ("view", "reshape"):
            sizes = args[1:] if len(args) > 2 or isinstance(args[1], int) else tuple(args[1])
            # The rows are usually the first of the sizes.
            args = args if -1 in sizes else (args[0], -1, *sizes[1:])
        return self._graph.call_method(name, args, kwargs)

    def _find(self, tensor: Tensor) -> fx.Node:
        """Return the node that makes a tensor, or a new node that fetches a tensor from outside."""
        if id(tensor) not in self._nodes:
            self._note(tensor, self._fetch(tensor))
        return self._nodes[id(tensor)]

    def _fetch(self, tensor: Tensor) -> fx.Node:
        """Return a node that fetches a tensor: a parameter or else a buffer."""
        name = f"held_{len(self._kept)}"
        if isinstance(tensor, nn.Parameter):
            self._root.register_parameter(name, tensor)
        else:
            self._root.register_buffer(name, tensor)
        return self._graph.get_attr(name)

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        """Record the node that makes a tensor from now on."""
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)
        node.meta["fxsplit_shape"] = describe_tensor(tensor)


def _find_extremes(table: Tensor) -> tuple[int, int]:
    """Return the positions of the smallest and of the largest entry."""
    return int(table.argmin()), int(table.argmax())
