"""Other shapes: check whether a graph that was captured for one shape of its inputs equals the model on another.

An exported graph has symbols for lengths if forward() allows it. torch.export claims that such a graph is right for
other lengths, but the model decides: on each new shape both run and are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx, nn

from fxsplit.errors import FxsplitError
from fxsplit.frontend.capture import CaptureOptions
from fxsplit.frontend.check.values import check_graph, check_other_sizes
from fxsplit.frontend.meanings.meanings import find_meanings
from fxsplit.frontend.restore.no_trace_left import restore_model
from fxsplit.frontend.subject import Subject
from fxsplit.frontend.watch.changes import list_changes
from fxsplit.frontend.watch.watch import Watch
from fxsplit.ir.facts.capture.call import Call, Inputs
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.ir.facts.capture.example import Example
from fxsplit.ir.facts.capture.numbers import set_numbers
from fxsplit.ir.facts.capture.python_state import PythonState
from fxsplit.ir.facts.capture.scope import Scope
from fxsplit.ir.graph import IR
from fxsplit.torch_internals.error_texts import is_out_of_memory
from fxsplit.torch_internals.scopes.log import hide_logged_warnings
from fxsplit.torch_internals.scopes.undo import restore_after

DIFFER = (FxsplitError, RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""Errors of a graph, or a model, on a shape that it is not made for."""


def fit_to_shapes(
    captured: IR, model: nn.Module, call: Call, rows: int | Sequence[int], stated: CaptureOptions
) -> IR | None:
    """Return the IR for the shapes of `call`, if its graph equals the model for them; None if a new graph is needed.

    - `rows`: the size of the call's largest microbatch, or the sizes of all microbatches
    - `stated`: the user's options for the model
    """
    scope, example, known = captured[Scope], captured[Example], captured[CallEffects]
    # Shapes prove nothing about a branch that forward() takes.
    if example.from_shapes or scope.guard is None:
        return None
    inputs, tensors = Inputs.of(model, *call, stated.chunks)
    numbers = captured[PythonState].read_numbers({n: now for n, (_, now) in example.inputs.find_numbers(*call).items()})
    fitted = replace(scope, inputs=inputs, _passed=set())
    divided = (rows,) if isinstance(rows, int) else tuple(rows)
    subject = Subject(model, inputs, tensors, max(divided), tuple(stated.leaves), divided=divided)
    watch = Watch(model)
    try:
        fitted.check_rows(divided)
        # Noted first, since the check runs forward(), which may write to more than the model.
        list_changes(subject, watch)
        with restore_after(watch.put_back), restore_model(model), hide_logged_warnings("torch"):
            graph = _copy_graph(captured.gm)
            set_numbers(graph, numbers)
            check_other_sizes(subject, graph, scope)
            effects = check_graph(subject, graph, subject.rows)
            asking = replace(subject, asks_for_gradients=watch.asks_for_gradients())
            effects = replace(effects, meanings=find_meanings(asking, graph, joined=stated.joined))
    except DIFFER as error:
        if is_out_of_memory(error):
            raise
        return None
    return captured.learn(fitted) if _are_alike(effects, known) else None


def _are_alike(a: CallEffects, b: CallEffects) -> bool:
    """Return whether two calls have the same effects, so that the plan for one also fits the other."""

    def list_parts(e: CallEffects) -> tuple[object, ...]:
        return (
            e.writes_inputs,
            set(e.written_buffers),
            e.saved_buffers,
            e.sets_hooks,
            e.containers,
            [(m.kind, m.dim, m.each) for m in e.meanings],
        )

    return list_parts(a) == list_parts(b)


def _copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with copies of the nodes and the same modules: a check writes shapes into the nodes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph, class_name=type(gm).__name__)
