"""Capture a model for one microbatch: the graph of the first front end that can, checked, with what is known of it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxsplit.errors import InputError, TraceError
from fxsplit.frontend.check.values import check_graph
from fxsplit.frontend.choose import Graph, choose_graph
from fxsplit.frontend.no_trace_left import refuse_assignments, restore_model
from fxsplit.ir.facts.call import Inputs
from fxsplit.ir.facts.chunks import Chunks
from fxsplit.ir.facts.effects import CallEffects
from fxsplit.ir.facts.example import Example
from fxsplit.ir.facts.scope import Scope
from fxsplit.ir.graph import IR
from fxsplit.torch_internals.fake_weights import lacks_values
from fxsplit.torch_internals.module_kinds import is_batch_norm


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: int,
    chunks: Chunks | None = None,
    leaves: Sequence[str] = (),
    from_shapes: bool = False,
) -> IR:
    """Return the IR of `model(*args, **kwargs)` in its present mode, for microbatches of its first `rows` rows.

    The IR knows its Example, its Scope and its CallEffects.

    `leaves` are paths of submodules that stay whole. `from_shapes`: nothing is computed, and the graph is checked as
    far as shapes say; so it is with a model on the meta device. Raises TraceError when no front end can follow the
    model, or when a graph computes anything else than the model does, InputError when an output is no batch.
    """
    lazy = next((path for path, w in (*model.named_parameters(), *model.named_buffers()) if is_lazy(w)), None)
    if lazy is not None:
        raise InputError(f"{lazy!r} has no shape yet: call {type(model).__name__} once, then compile it")
    scripted = next((path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise TraceError(
            f"submodule {scripted!r} of {type(model).__name__} is from torch.jit, which keeps its parameters to itself:"
            " give the model the module that it was scripted from"
        )
    from_shapes = from_shapes or lacks_values(model)
    inputs, tensors = Inputs.of(model, args, kwargs, chunks)
    batch = inputs.rows(tensors)
    own, cut = inputs.narrow(tensors, rows), rows < batch
    clones = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in own)

    def check(graph: Graph) -> Graph:
        with refuse_assignments(model):
            found = check_graph(model, graph.gm, inputs, own, from_shapes, cut)
            if rows == 1 and batch > 1:  # one row alone would not show an output that is no batch
                two = inputs.narrow(tensors, 2)
                found["joined"] = check_graph(model, graph.gm, inputs, two, from_shapes)["joined"]
        return replace(graph, findings=found)

    def check_one(graph: Graph) -> Graph:
        with refuse_assignments(model):
            one = inputs.narrow(tensors, 1)
            return replace(graph, findings=check_graph(model, graph.gm, inputs, one, from_shapes, cut))

    with restore_model(model):
        graph = choose_graph(model, inputs, tensors, rows, leaves, from_shapes, check, check_one)
    scope = Scope(inputs, graph.front_end, graph.fixed, graph.bounds, graph.guard)
    found = graph.findings
    # Batch norms' statistics can be kept in order by the batch-norm pass; other written buffers are to be known.
    statistics = {id(b) for m in model.modules() if is_batch_norm(m) for b in m.buffers(recurse=False)}
    written = {path: operator.attrgetter(path)(model) for path in found["updated"]}
    effects = CallEffects(
        writes_inputs=found["written"],
        written_buffers={path: b for path, b in written.items() if id(b) not in statistics},
        saved_buffers=found["rewritten"],
        sets_hooks=found["hooking"],
        containers=found["returns"],
        output_dims=found["joined"],
    )
    return IR(graph.gm).learn(Example(inputs, clones, from_shapes), scope, effects)
