"""Choose the graph that a model becomes: attempt one front end after the other, until a graph is the model.

A model may be impossible to follow for symbolic tracing (it decides by a shape), for torch.export (it decides by a
value), or for both. In the last case the submodules that decide stay whole, as one call each in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torch import nn

from fxsplit.errors import TraceError
from fxsplit.frontend.check.values import check_graph, check_other_sizes
from fxsplit.frontend.follow import follow_numbers
from fxsplit.frontend.front_ends.export.exporter import LEAST_ROWS, TorchExport
from fxsplit.frontend.front_ends.export.fixed_rows import FixedRows, OtherGraph
from fxsplit.frontend.front_ends.graph_module import GivenGraph
from fxsplit.frontend.front_ends.symbolic import SymbolicTrace
from fxsplit.frontend.graph import FrontEnd, Graph
from fxsplit.frontend.subject import Subject
from fxsplit.ir.facts.capture.effects import CallEffects
from fxsplit.system.progress import phase
from fxsplit.torch_internals.tracing.late_code import generate_code_late
from fxsplit.torch_internals.tracing.stack_traces import remember_frames
from fxsplit.torch_internals.user_lines import warn_user

MOST_LEAVES = 16
"""After so many attempts, each with one more class of submodules that have to stay whole, there is little to split."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Checked = tuple[Graph, CallEffects]
"""A graph that computes what the model computes, and what the check has found a call to leave behind."""


def choose_graph(subject: Subject) -> Checked:
    """Return the first graph that is the model; raises TraceError, with every front end's reason, if there is none.

    A GraphModule is taken as it is. Any other model is traced symbolically; exported where that fails, with lengths
    that vary, then with those of the example, then for the sizes of its microbatches only; traced with the submodules
    whole in which tracing failed, where exporting fails too; and at last exported with submodules whole.
    """
    if GivenGraph.takes(subject.model):
        return _attempt(GivenGraph(), subject)
    subject.check_whole()
    try:
        return _attempt(SymbolicTrace(), subject)
    except TraceError as error:
        untraced = error
    # The outputs of a submodule that stays whole are recorded, at one length.
    if not subject.whole:
        with suppress(TraceError):
            return _attempt(TorchExport(lengths_vary=True), subject)
    try:
        return _attempt(TorchExport(), subject)
    except TraceError as error:
        unexported = error
    # Window code such as Swin's, and a loss that compares rows such as CLIP's, make a constant of the number of rows.
    fixed = FixedRows(TorchExport(rows_vary=False))
    try:
        return _attempt(fixed, subject)
    except TraceError as error:
        unfixed = error
    # The last one first: what has stopped it is nearest to what would help.
    last = unfixed if isinstance(unfixed, OtherGraph) else unexported
    reasons = f"{last}; {untraced}"
    found = _attempt_around(SymbolicTrace(), subject, untraced, reasons)
    found = found or _attempt_around(TorchExport(), subject, unexported, reasons)
    found = found or _attempt_around(fixed, subject, unfixed, reasons)
    if found is None:
        raise TraceError(f"{last}. Before that, {untraced}") from last
    return found


def _attempt(front_end: FrontEnd, subject: Subject) -> Checked:
    """Return the checked graph of one front end; raises TraceError where it makes none, or one that is not the model.

    InputError, for an output that no pipeline can hand on, is the model's fault: no other front end would help.
    """
    with phase(f"capturing {subject.name} ({front_end.name})"), remember_frames(), generate_code_late():
        graph = front_end.attempt(replace(subject, numbers=()))
    checked = _check(subject, graph)
    return follow_numbers(front_end, subject, lambda graph: _check(subject, graph)) or checked


def _check(subject: Subject, graph: Graph) -> Checked:
    """Return a graph with all numbers of rows that it is right for; raises TraceError if it is not the model."""
    with phase(f"comparing the graph with {subject.name}"):
        return _check_rows(subject, graph)


def _check_rows(subject: Subject, graph: Graph) -> Checked:
    """Return a graph as `_check` does."""
    if graph.scope.pins_rows(max(subject.rows, LEAST_ROWS)):
        raise TraceError(f"forward() of {subject.name} makes its number of rows a constant ({subject.rows})")
    # torch.export takes one row for a constant, so it has only looked at two rows or more.
    least, most = graph.scope.bounds
    asked = least == LEAST_ROWS and not graph.scope.rows_fixed
    # Before the check of the microbatch, whose shapes are noted in the graph. That is one row itself at times.
    ran = asked and subject.rows != 1 and _runs_on_one_row(subject, graph)
    wider = asked and (subject.rows == 1 or ran)
    check_other_sizes(subject, graph.gm, graph.scope)
    effects = check_graph(subject, graph.gm, subject.rows, by="nodes" if ran else "both")
    return replace(graph, scope=replace(graph.scope, bounds=(1, most))) if wider else graph, effects


def _attempt_around(front_end: FrontEnd, subject: Subject, failed: TraceError, reasons: str) -> Checked | None:
    """Return the graph in which the submodules stay whole that the front end fails in; None if that does not help.

    `failed` is the error of the attempt without them. A submodule that stays whole may still be in the way, for example
    because its caller reads a value that it returns; then the next error names the submodule around it.
    """
    whole: list[str] = []
    kinds: list[type[nn.Module]] = []
    while failed.submodule and failed.submodule not in (*subject.whole, *whole) and len(kinds) < MOST_LEAVES:
        kind = type(subject.model.get_submodule(failed.submodule))
        # The second of a class fails for the first one's reason, and so will all others.
        found = _list_alike(subject.model, kind) if kind in kinds else [failed.submodule]
        kinds.append(kind)
        # What lies inside of a submodule that stays whole is never seen, so its path would match nothing.
        whole = _drop_inner([*whole, *(path for path in found if path not in whole)])
        try:
            graph, effects = _attempt(front_end, replace(subject, whole=(*subject.whole, *whole)))
        except TraceError as error:
            failed = error
            continue
        _warn_of_whole(subject, whole, reasons)
        scope = replace(graph.scope, front_end=f"{front_end.name}, with submodules kept whole")
        return replace(graph, scope=scope), effects
    return None


def _list_alike(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the paths of all submodules of one class, but of the containers that any module may use."""
    named = model.named_modules(remove_duplicate=False)
    return [path for path, m in named if path and type(m) is kind and not isinstance(m, CONTAINERS)]


def _drop_inner(paths: Sequence[str]) -> list[str]:
    """Return those of the paths that lie inside of no other one."""
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _warn_of_whole(subject: Subject, whole: Sequence[str], reasons: str) -> None:
    """Warn of submodules that stay whole, once for each class."""
    kinds: dict[str, list[str]] = {}
    for path in whole:
        kinds.setdefault(type(subject.model.get_submodule(path)).__name__, []).append(path)
    for kind, (path, *more) in kinds.items():
        others = f" ({kind}), and so do {len(more)} more of its class" if more else ""
        warn_user(
            f"submodule {path!r} of {subject.name} stays whole{others}, as no front end can follow it ({reasons}); "
            f"fxsplit.leaf({path!r}) in passes= says that this is meant"
        )


def _runs_on_one_row(subject: Subject, graph: Graph) -> bool:
    """Return whether an exported graph is the model on a single row too, of which torch.export says nothing."""
    try:
        check_graph(subject, graph.gm, rows=1, by="code")
    # The model itself may want several rows, and fail in any way: in an assert, or at an index of another row.
    except Exception:
        return False
    return True
