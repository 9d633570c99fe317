"""Follow numbers: make Python numbers inputs of a graph if the model only does arithmetic with them.

A number that decides a branch, or is converted to another kind of value, cannot be an input: tracing fails, or the
graph differs for another value. So the graph is compared with the model for the present value and for an earlier one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import fx

from fxsplit.errors import TraceError
from fxsplit.frontend.check.values import check_graph
from fxsplit.frontend.graph import FrontEnd, Graph
from fxsplit.frontend.subject import FirstRun, Subject
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.capture.numbers import hold_numbers, list_number_nodes, set_numbers
from fxsplit.ir.facts.capture.python_state import NumberPlace
from fxsplit.torch_internals.error_texts import is_out_of_memory
from fxsplit.torch_internals.fx.dependences import find_inseparable, find_ordered_pairs
from fxsplit.torch_internals.fx.observe import observe
from fxsplit.torch_internals.scopes.log import hide_warnings
from fxsplit.torch_internals.scopes.undo import restore_after

Check = Callable[[Graph], tuple[Graph, CallEffects]]
"""Compares a graph with the model, and returns the graph with the effects of a call."""


def follow_numbers(front_end: FrontEnd, subject: Subject, check: Check) -> tuple[Graph, CallEffects] | None:
    """Return a graph in which as many of the subject's numbers as possible are inputs.

    Returns None if no number can be.
    check: compares a graph with the model.
    """
    found = _attempt(front_end, subject, subject.numbers, check) if subject.numbers else None
    if found is not None or len(subject.numbers) < 2:
        return found
    # A single number may be in the way.
    kept: list[NumberPlace] = []
    for number in subject.numbers:
        more = _attempt(front_end, subject, [*kept, number], check)
        if more is not None:
            found = more
            kept.append(number)
    return found


def _attempt(
    front_end: FrontEnd, subject: Subject, numbers: Sequence[NumberPlace], check: Check
) -> tuple[Graph, CallEffects] | None:
    """Return a graph with all of these numbers as inputs, compared with the model; None if that is impossible."""
    # The warnings of the graph without these inputs were shown before.
    with hide_warnings(), restore_after(subject.empty_caches):
        try:
            # A cache that the model's own runs have filled hides the arithmetic with the number. A cache filled by
            # tracing holds proxies, and no numbers.
            subject.empty_caches()
            graph = front_end.attempt(replace(subject, numbers=tuple(numbers)))
            subject.empty_caches()
            inputs = list_number_nodes(graph.gm.graph)
            if len(inputs) != len(numbers):
                return None
            returned = graph.gm.graph.output_node().all_input_nodes
            checked = check(graph)
            # Stages hand on only tensors: the check has made a constant of any other output, and has taken containers
            # apart.
            kept = graph.gm.graph.output_node().all_input_nodes
            kept += [node for part in kept for node in part.all_input_nodes if part.target is operator.getitem]
            if not _list_ancestors([node for node in returned if node not in kept]).isdisjoint(inputs):
                return None
            _check_others(subject, graph, numbers)
        except Exception as error:  # forward() may raise anything for a proxy in place of a number
            if is_out_of_memory(error):
                raise
            return None
    return replace(checked[0], followed=tuple(numbers)), checked[1]


def _list_ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the given nodes, and all nodes from which their values are computed."""
    found, left = set[fx.Node](), [*nodes]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _check_others(subject: Subject, graph: Graph, numbers: Sequence[NumberPlace]) -> None:
    """Raise TraceError unless graph and model are also equal for other values of the numbers, with the same effects."""
    # With other numbers the model returns other values than in its first run.
    subject = replace(subject, first=FirstRun())
    now, others = [n.place.read() for n in numbers], [n.other for n in numbers]
    subject.empty_caches()
    with restore_after(partial(set_numbers, graph.gm, now)), restore_after(subject.empty_caches):
        drawing, bound = _list_effects(subject, graph.gm)
        set_numbers(graph.gm, others)
        with hold_numbers(numbers, others):
            check_graph(subject, graph.gm, subject.rows)
        same_effects = _list_effects(subject, graph.gm) == (drawing, bound)
        # A dropout with a rate of 0 returns its input and no new memory. A divisor, for example, may not be zero.
        set_numbers(graph.gm, [type(value)(0) for value in now])
        with suppress(ArithmeticError, LookupError, ValueError, RuntimeError):
            same_effects &= _list_effects(subject, graph.gm)[1] == bound
    if not same_effects:
        raise TraceError("which nodes draw, or which must stay together or in order, depends on a number")


def _list_effects(subject: Subject, gm: fx.GraphModule) -> tuple[set[str], tuple[object, object]]:
    """Return which nodes draw random numbers, which nodes must stay together, and which pairs keep their order.

    A cut of the graph into stages must respect all of them.
    """
    seen = observe(gm, subject.take_rows(subject.rows), from_shapes=subject.from_shapes)
    return {name for name, node in seen.items() if node.draws}, (
        find_inseparable(gm, seen),
        find_ordered_pairs(gm, seen),
    )
