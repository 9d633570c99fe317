"""The order of a file's nodes: deterministic, or an error that names a cycle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from fxsplit.errors import ProfileError


def sort_topologically(before: Mapping[str, Iterable[str]], name: str) -> list[str]:
    """Return the nodes of `before` (each with those it needs) in a topological order; `name` is the file's."""
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        cycle = " -> ".join(str(node) for node in error.args[1])
        raise ProfileError(f"{name!r} has a cycle ({cycle}): a pipeline needs an acyclic graph") from error
