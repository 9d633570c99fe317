"""Sort the nodes of a file topologically, or name the cycle that forbids it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from fxsplit.errors import ProfileError


def sort_topologically(before: Mapping[str, Iterable[str]], name: str) -> list[str]:
    """Return all nodes in an order in which each stands behind those it needs; `before[n]` is what node n needs.

    The order depends on the file alone: the same file gives the same order. Raises ProfileError, with the cycle and the
    file's `name`, where there is none.
    """
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        # The first and last node of the cycle are the same one.
        cycle = " -> ".join(str(node) for node in error.args[1])
        raise ProfileError(f"{name!r} has a cycle ({cycle}): a pipeline needs an acyclic graph") from error
