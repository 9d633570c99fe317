"""Contracts of passes: which facts a pass needs, learns and keeps. They are checked before and after the pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from fxsplit.errors import BrokenFact, MissingFact
from fxsplit.ir.graph import IR, Pass, is_own, name_pass


def list_kinds(step: Any, field: str) -> tuple[type, ...]:
    """Return the types of facts that a pass lists in one field of its contract, such as "needs"."""
    return tuple(getattr(step, field, ()))


def check_needs(step: Pass, ir: IR) -> None:
    """Raise MissingFact, with the name of the pass, unless `ir` has the facts that the pass needs."""
    for kind in list_kinds(step, "needs"):
        try:
            ir[kind]
        except MissingFact as error:
            raise MissingFact(f"{error} ({name_pass(step)!r} needs it{_find_line(step)})") from error


def check_kept(step: Pass, before: IR, after: IR) -> None:
    """Raise BrokenFact, with the line of the pass, unless the pass has kept its contract."""
    line = _find_line(step)
    for kind in list_kinds(step, "learns"):
        if after.facts.get(kind) is None or after.facts.get(kind) is before.facts.get(kind):
            raise BrokenFact(f"the pass says that it learns {kind.__name__}, and has not{line}")
    for kind in list_kinds(step, "keeps"):
        if after.facts.get(kind) is not before.facts.get(kind):
            raise BrokenFact(f"the pass says that it keeps {kind.__name__}, and has changed it{line}")
    if getattr(step, "keeps_nodes", False):
        _compare(_list_nodes(before), _list_nodes(after), "the nodes of the graph", line)
    if getattr(step, "keeps_draws", False):
        drawing = _list_drawing(before)
        rest = [name for name in _list_nodes(after) if name in drawing]
        _compare(drawing, rest, "the order of the nodes that draw random numbers", line)


def _list_nodes(ir: IR) -> list[str]:
    """Return the names of the nodes of a graph, in order."""
    return [node.name for node in ir.gm.graph.nodes]


def _list_drawing(ir: IR) -> list[str]:
    """Return the nodes that draw random numbers, in the order of the graph; empty if that is not known."""
    drawing: frozenset[str] = next(
        (fact.drawing for fact in ir.facts.values() if hasattr(fact, "drawing")), frozenset()
    )
    return [name for name in _list_nodes(ir) if name in drawing]


def _compare(before: Sequence[str], after: Sequence[str], what: str, line: str) -> None:
    """Raise BrokenFact, with the first difference, unless two lists of nodes are equal."""
    if list(before) != list(after):
        pairs = zip([*before, "nothing"], [*after, "nothing"], strict=False)
        odd, now = next((pair for pair in pairs if pair[0] != pair[1]), ("nothing", "nothing"))
        raise BrokenFact(f"the pass says that it keeps {what}, and {odd!r} is {now!r} now{line}")


def _find_line(step: Any) -> str:
    """Return the file and line of a pass that is not fxsplit's own, for messages; empty if unknown."""
    if is_own(step):
        return ""
    held = step if inspect.isfunction(step) else type(step)
    try:
        return f", {inspect.getsourcefile(held)}:{inspect.getsourcelines(held)[1]}"
    except (OSError, TypeError):
        return ""
