"""The front ends, in the order they are tried: symbolic tracing, torch.export, and both around what fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from fxsplit.errors import FxsplitError, TraceError
from fxsplit.frontend.export.exporter import LEAST_ROWS, Bounds, Guard, export
from fxsplit.frontend.graph_module import copy_given_graph
from fxsplit.frontend.no_trace_left import refuse_assignments, refuse_draws, restore_model
from fxsplit.frontend.symbolic import symbolic_trace
from fxsplit.ir.facts.call import Inputs
from fxsplit.torch_internals.graph_devices import fix_constant_devices
from fxsplit.torch_internals.rng import read_generators, read_python_generators

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


def choose_graph(
    model: nn.Module,
    inputs: Inputs,
    tensors: Sequence[Tensor],
    rows: int,
    leaves: Sequence[str],
    from_shapes: bool,
    check: Check,
    check_one: Check,
) -> Graph:
    """Return the first graph that is the model; raises TraceError saying why there is none.

    A GraphModule is taken as it is. Otherwise the model is traced symbolically, with `leaves` whole; exported where
    that fails; and where that fails too, traced with the submodules whole that tracing cannot follow. `check` compares
    a graph with the model, `check_one` does so on a single row.
    """
    if isinstance(model, fx.GraphModule) and type(model.graph._codegen) is fx.graph.CodeGen:  # not an exported one
        return check(Graph(copy_given_graph(model, inputs), "graph_module"))
    for path in leaves:
        _submodule(model, path)

    def traced(whole: Sequence[str], name: str) -> Graph:
        draws = refuse_draws(model, lambda: (read_generators(), read_python_generators()))
        with (
            restore_model(model),
            refuse_assignments(model),
            draws,
        ):  # a cache would be left with what stands for tensors
            gm = symbolic_trace(model, inputs, whole)
        return check(Graph(fix_constant_devices(gm, tensors[0].device), name))

    def exported(whole: Sequence[str], name: str) -> Graph:
        count = max(rows, LEAST_ROWS)
        given = inputs.narrow(tensors, count) if inputs.rows(tensors) >= count else inputs.doubled(tensors)
        with restore_model(model), refuse_assignments(model), refuse_draws(model, read_python_generators):
            gm, bounds, guard = export(model, inputs, given, from_shapes, whole)
        found = Graph(gm, name, fixed=True, bounds=bounds, guard=guard)
        return check(_with_one_row(found, check_one) if bounds[0] == LEAST_ROWS else found)

    failures = []
    for front_end, name in ((traced, "symbolic_trace"), (exported, "export")):
        try:
            return front_end(leaves, name)
        except TraceError as error:
            failures.append(error)
    first, second = failures
    for front_end, name, failed in ((traced, "symbolic_trace", first), (exported, "export", second)):
        found = _with_leaves(front_end, name, failed, leaves)
        if found is not None:
            graph, whole = found
            for path in whole:
                warnings.warn(
                    f"submodule {path!r} of {type(model).__name__} stays whole, as no front end can follow it ({first};"
                    f" {second}); fxsplit.leaf({path!r}) in passes= says that this is meant",
                    stacklevel=2,
                )
            return graph
    raise TraceError(f"{first}; nor does torch.export help: {second}") from first


def _with_leaves(
    front_end: Callable[[Sequence[str], str], Graph], name: str, failed: TraceError, leaves: Sequence[str]
) -> tuple[Graph, list[str]] | None:
    """Return the graph in which the submodules stay whole that a front end fails in, and those; None if that fails."""
    whole: list[str] = []
    while failed.submodule and failed.submodule not in (*leaves, *whole) and len(whole) < MOST_LEAVES:
        whole = [path for path in whole if not path.startswith(f"{failed.submodule}.")]
        whole.append(failed.submodule)
        try:
            return front_end([*leaves, *whole], f"{name}, with submodules kept whole"), whole
        except TraceError as error:
            failed = error
    return None


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
