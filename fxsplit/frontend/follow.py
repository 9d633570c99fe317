"""Follow numbers: let a graph have Python numbers as inputs, where the model only computes with them.

A number that decides a branch, or is turned into another kind of value, cannot be an input: tracing fails, or the graph
is another one for another value. So the graph is compared with the model with the value of now, and with one of before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from fxsplit.errors import TraceError
from fxsplit.frontend.check.values import check_graph
from fxsplit.frontend.graph import FrontEnd, Graph
from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.capture.numbers import hold_numbers, list_number_nodes, set_numbers
from fxsplit.ir.facts.capture.python_state import NumberPlace
from fxsplit.torch_internals.fx.dependences import find_inseparable, find_ordered_pairs
from fxsplit.torch_internals.fx.observe import observe
from fxsplit.torch_internals.scopes.log import hide_warnings
from fxsplit.torch_internals.scopes.undo import restore_after

Check = Callable[[Graph], tuple[Graph, CallEffects]]
"""Compares a graph with the model, and returns it with what a call leaves behind."""


def follow_numbers(front_end: FrontEnd, subject: Subject, check: Check) -> tuple[Graph, CallEffects] | None:
    """Return the graph that a front end makes with as many of the subject's numbers as inputs as can be.

    None where that is none of them.
    """
    found = _attempt(front_end, subject, subject.numbers, check) if subject.numbers else None
    if found is not None or len(subject.numbers) < 2:
        return found
    # One alone may be in the way.
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
    """Return the checked graph with these numbers as inputs; None where that is impossible."""
    # What the graph without them warns of has been said.
    with hide_warnings(), restore_after(subject.empty_caches):
        try:
            # A cache that the model's own runs have filled hides what is computed with the number. What tracing puts
            # into one is no number.
            subject.empty_caches()
            graph = front_end.attempt(replace(subject, numbers=tuple(numbers)))
            subject.empty_caches()
            if len(list_number_nodes(graph.gm.graph)) != len(numbers):
                return None
            checked = check(graph)
            _check_others(subject, graph, numbers)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever forward() makes of a value that stands for a number
            return None
    return replace(checked[0], followed=tuple(numbers)), checked[1]


def _check_others(subject: Subject, graph: Graph, numbers: Sequence[NumberPlace]) -> None:
    """Raise TraceError unless the graph is the model with other values of the numbers too, and has the same effects."""
    now, others = [n.place.read() for n in numbers], [n.other for n in numbers]
    subject.empty_caches()
    with restore_after(partial(set_numbers, graph.gm, now)), restore_after(subject.empty_caches):
        drawing, bound = _list_effects(subject, graph.gm)
        set_numbers(graph.gm, others)
        with hold_numbers(numbers, others):
            check_graph(subject, graph.gm, subject.rows)
        same_effects = _list_effects(subject, graph.gm) == (drawing, bound)
        # A dropout returns its input at a rate of 0, and not new memory. Other numbers may be no zeros, as divisors.
        set_numbers(graph.gm, [type(value)(0) for value in now])
        with suppress(ArithmeticError, LookupError, ValueError, RuntimeError):
            same_effects &= _list_effects(subject, graph.gm)[1] == bound
    if not same_effects:
        raise TraceError("which nodes draw, or which must stay together or in order, depends on a number")


def _list_effects(subject: Subject, gm: fx.GraphModule) -> tuple[set[str], tuple[object, object]]:
    """Return the nodes of a graph that draw; and those that must stay together, with those that must keep their order.

    A cut of the graph must suit all of them.
    """
    seen = observe(gm, subject.take_rows(subject.rows), from_shapes=subject.from_shapes)
    return {name for name, node in seen.items() if node.draws}, (
        find_inseparable(gm, seen),
        find_ordered_pairs(gm, seen),
    )
