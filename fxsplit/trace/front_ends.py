"""The front ends, in the order they are tried: symbolic tracing, torch.export, symbolic tracing around what fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from fxsplit.errors import FxsplitError, TraceError
from fxsplit.inputs import Inputs
from fxsplit.placement import with_constant_devices
from fxsplit.trace.exporter import LEAST_ROWS, Bounds, Guard, export
from fxsplit.trace.given import taken
from fxsplit.trace.tracer import symbolic_trace
from fxsplit.trace.untouched import unassigned

MOST_LEAVES = 16
"""After so many submodules that have to stay whole there is little left to split."""


@dataclass(frozen=True)
class Graph:
    """A graph, how it was made, and for which shapes it is right; `findings` are what the check has found."""

    gm: fx.GraphModule
    front_end: str
    fixed: bool = False
    bounds: Bounds = (1, None)
    guard: Guard = None
    findings: dict[str, Any] = field(default_factory=dict)


Check = Callable[[Graph], Graph]
"""Returns a graph with its findings; raises TraceError for one that is not the model."""


def graph_of(
    model: nn.Module,
    inputs: Inputs,
    tensors: Sequence[Tensor],
    rows: int,
    leaves: Sequence[str],
    check: Check,
    check_one: Check,
) -> Graph:
    """Return the first graph that is the model; raises TraceError saying why there is none.

    A GraphModule is taken as it is. Otherwise the model is traced symbolically, with `leaves` whole; exported where
    that fails; and where that fails too, traced with the submodules whole that tracing cannot follow. `check` compares
    a graph with the model, `check_one` does so on a single row.
    """
    if isinstance(model, fx.GraphModule) and type(model.graph._codegen) is fx.graph.CodeGen:  # not an exported one
        return check(Graph(taken(model, inputs), "graph_module"))
    for path in leaves:
        _submodule(model, path)

    def traced(whole: Sequence[str], name: str) -> Graph:
        with unassigned(model):
            gm = symbolic_trace(model, inputs, whole)
        return check(Graph(with_constant_devices(gm, tensors[0].device), name))

    try:
        return traced(leaves, "symbolic_trace")
    except TraceError as error:
        first = error
    try:
        count = max(rows, LEAST_ROWS)
        given = inputs.narrow(tensors, count) if inputs.rows(tensors) >= count else inputs.doubled(tensors)
        with unassigned(model):
            gm, bounds, guard = export(model, inputs, given)
        found = Graph(gm, "export", fixed=True, bounds=bounds, guard=guard)
        return check(_with_one_row(found, check_one) if bounds[0] == LEAST_ROWS else found)
    except TraceError as error:
        second = error
    whole, failed = list(leaves), first
    while failed.submodule and failed.submodule not in whole and len(whole) < len(leaves) + MOST_LEAVES:
        whole.append(failed.submodule)
        try:
            found = traced(whole, "symbolic_trace, with submodules kept whole")
        except TraceError as error:
            failed = error
            continue
        for path in whole[len(leaves) :]:
            warnings.warn(
                f"submodule {path!r} of {type(model).__name__} stays whole, as no front end can follow it ({first}); "
                f"fxsplit.leaf({path!r}) in passes= says that this is meant",
                stacklevel=2,
            )
        return found
    raise TraceError(f"{first}; nor does torch.export help: {second}") from first


def _with_one_row(graph: Graph, check_one: Check) -> Graph:
    """Return an exported graph as one for a single row too, if it is: torch.export has not looked at that."""
    try:
        check_one(graph)
    except (FxsplitError, ValueError, RuntimeError):  # the model itself may want several, as batch norm does
        return graph
    return replace(graph, bounds=(1, graph.bounds[1]))


def _submodule(model: nn.Module, path: str) -> None:
    """Raise TraceError unless the model has a submodule under a path."""
    if path not in dict(model.named_modules(remove_duplicate=False)) or not path:
        known = ", ".join(name for name, _ in model.named_children())
        raise TraceError(f"fxsplit.leaf({path!r}): {type(model).__name__} has no such submodule; it has {known}")
