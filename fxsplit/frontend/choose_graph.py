"""Choose the graph of a model: attempt one front end after the other, until a graph equals the model.

Symbolic tracing cannot follow a model that decides by a shape, and torch.export cannot follow one that decides by a
value. If a model does both, the submodules that decide stay whole, as one call each in the graph.
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
from fxsplit.system.user_lines import warn_user
from fxsplit.torch_internals.tracing.late_code import generate_code_late
from fxsplit.torch_internals.tracing.stack_traces import remember_frames

MOST_LEAVES = 16
"""The most attempts, each with one more class of whole submodules. Beyond this, there is little left to split."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Checked = tuple[Graph, CallEffects]
"""A graph that computes the same as the model, and the effects of a call that the check has found."""


def choose_graph(subject: Subject) -> Checked:
    """Return the first graph that equals the model. Raises TraceError, with every front end's reason, if there is none.

    A GraphModule is taken as it is. For any other model, the attempts are, in this order:

    - trace it symbolically
    - export it, with lengths that vary
    - export it for the lengths of the example
    - export it only for the sizes of its microbatches
    - trace it, with the submodules whole in which tracing failed
    - export it in both ways, with submodules whole
    """
    if GivenGraph.takes(subject.model):
        return _attempt(GivenGraph(), subject)
    subject.check_whole()
    try:
        return _attempt(SymbolicTrace(), subject)
    except TraceError as error:
        untraced = error
    # The outputs of a submodule that stays whole are recorded at one length.
    if not subject.whole:
        with suppress(TraceError):
            return _attempt(TorchExport(lengths_vary=True), subject)
    try:
        return _attempt(TorchExport(), subject)
    except TraceError as error:
        unexported = error
    # The number of rows becomes a constant in window code such as Swin's, and in a loss that compares rows, as CLIP's.
    fixed = FixedRows(TorchExport(rows_vary=False))
    try:
        return _attempt(fixed, subject)
    except TraceError as error:
        unfixed = error
    # The last error comes first, since its cause is nearest to a working graph.
    last = unfixed if isinstance(unfixed, OtherGraph) else unexported
    reasons = f"{last}; {untraced}"
    found = _attempt_around(SymbolicTrace(), subject, untraced, reasons)
    found = found or _attempt_around(TorchExport(), subject, unexported, reasons)
    found = found or _attempt_around(fixed, subject, unfixed, reasons)
    if found is None:
        raise TraceError(f"{last}. Before that, {untraced}") from last
    return found


def _attempt(front_end: FrontEnd, subject: Subject) -> Checked:
    """Return the graph of one front end, after it has been compared with the model.

    Raises TraceError if the front end makes no graph, or if its graph differs from the model. An InputError, for an
    output that no pipeline can hand on, is the model's fault: no other front end would help.
    """
    with phase(f"capturing {subject.name} ({front_end.name})"), remember_frames(), generate_code_late():
        graph = front_end.attempt(replace(subject, numbers=()))
    checked = _check(subject, graph)
    return follow_numbers(front_end, subject, lambda graph: _check(subject, graph)) or checked


def _check(subject: Subject, graph: Graph) -> Checked:
    """Compare a graph with the model.

    Return the graph, with the numbers of rows it is right for, and the call's effects.
    Raises TraceError if the graph differs from the model.
    """
    with phase(f"comparing the graph with {subject.name}"):
        return _check_rows(subject, graph)


def _check_rows(subject: Subject, graph: Graph) -> Checked:
    """Compare a graph with the model, as `_check` does, but without reporting progress."""
    if graph.scope.pins_rows(max(subject.rows, LEAST_ROWS)):
        raise TraceError(f"forward() of {subject.name} makes its number of rows a constant ({subject.rows})")
    # torch.export takes one row for a constant, so it has only looked at two rows or more.
    least, most = graph.scope.bounds
    claims_two = least == LEAST_ROWS and not graph.scope.rows_fixed
    # This comes before the check of the microbatch, since that check notes shapes in the graph. A microbatch may also
    # have one row.
    ran_one = claims_two and subject.rows != 1 and _runs_on_one_row(subject, graph)
    holds_for_one = claims_two and (subject.rows == 1 or ran_one)
    check_other_sizes(subject, graph.gm, graph.scope)
    effects = check_graph(subject, graph.gm, subject.rows, by="nodes" if ran_one else "both")
    return replace(graph, scope=replace(graph.scope, bounds=(1, most))) if holds_for_one else graph, effects


def _attempt_around(front_end: FrontEnd, subject: Subject, failed: TraceError, reasons: str) -> Checked | None:
    """Return a graph in which the submodules that the front end cannot follow stay whole; None if that does not help.

    failed: the error of the attempt without whole submodules.
    A whole submodule may still be in the way, for example because its caller reads a value that it returns. The next
    error then names the submodule around it.
    """
    whole: list[str] = []
    kinds: list[type[nn.Module]] = []
    while failed.submodule and failed.submodule not in (*subject.whole, *whole) and len(kinds) < MOST_LEAVES:
        kind = type(subject.model.get_submodule(failed.submodule))
        # If a second submodule of the class fails, it has the first one's reason, and all the rest will fail too.
        found = _list_alike(subject.model, kind) if kind in kinds else [failed.submodule]
        kinds.append(kind)
        # Nothing inside a whole submodule is seen, so a path into it would match nothing.
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
    """Return the paths of all submodules of one class, except containers that any module may use."""
    named = model.named_modules(remove_duplicate=False)
    return [path for path, m in named if path and type(m) is kind and not isinstance(m, CONTAINERS)]


def _drop_inner(paths: Sequence[str]) -> list[str]:
    """Return the paths of submodules that lie inside no other submodule of the list."""
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
    """Return whether an exported graph equals the model on a single row too, which torch.export leaves open."""
    try:
        check_graph(subject, graph.gm, rows=1, by="code")
    # The model itself may need several rows, and fail in any way: in an assert, or at an index of another row.
    except Exception:
        return False
    return True
