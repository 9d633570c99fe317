"""What the formats have in common: the Profile that is read from a file, and the order of a file's nodes.

A Profile has costs, and the machine that they are for where the file states one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import inf

from fxsplit.errors import ProfileError
from fxsplit.ir.facts.costs.costs import Costs


# Costs are large, and nobody compares two profiles: identity is enough.
@dataclass(frozen=True, eq=False)
class Profile:
    """Costs read from a file of some `format`.

    - `unit`: the file's unit of time, in which objectives are printed.
    - `accelerators`, `hosts`, `memory_bytes`, `bytes_per_s`: the machine that the file states; `accelerators` is None
      where it states no devices.
    - `cost_model`: the cost model under which the tool that wrote the file plans.
    - `never_ms`: a stage that takes so long has nodes that cannot run where they are.
    - `nominal_bytes_per_ms`: where the file states how long transfers take and not how large they are, a millisecond
      is written as so many bytes; 0 where sizes are real.
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
