"""What all formats of profiles share: the class of a profile from a file, and the topological order of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import inf

from fxsplit.errors import ProfileError
from fxsplit.ir.facts.costs.costs import Costs


# Costs are large and never compared: identity is enough.
@dataclass(frozen=True, eq=False)
class ProfileFile:
    """A profile from a file of some `format`: its costs, and the machine that they are for if the file states one.

    - `unit`: the file's unit of time, in which objectives are printed
    - `accelerators`, `hosts`, `memory_bytes`, `bytes_per_s`: the machine in the file; `accelerators` is None if the
      file states no machine
    - `cost_model`: the cost model that the other tool plans with
    - `never_ms`: a stage that takes this long has nodes that cannot run on its devices
    - `nominal_bytes_per_ms`: if the file states times of transfers instead of sizes, this number of bytes stands for a
      millisecond; 0 for real sizes
    """

    costs: Costs
    format: str
    unit: str = "ms"
    accelerators: int | None = None
    hosts: int = 0
    memory_bytes: float = inf
    bytes_per_s: float = inf
    cost_model: str = "forwarded"
    never_ms: float = inf
    nominal_bytes_per_ms: float = 0.0


def sort_topologically(before: Mapping[str, Iterable[str]], name: str) -> list[str]:
    """Return all nodes in topological order; `before[n]` are the inputs of node n.

    The order is deterministic for a file. Raises ProfileError, with the cycle and the file's `name`, for a cyclic
    graph.
    """
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        # The first and the last node of the cycle are the same.
        cycle = " -> ".join(str(node) for node in error.args[1])
        raise ProfileError(f"{name!r} has a cycle ({cycle}): a pipeline needs an acyclic graph") from error
