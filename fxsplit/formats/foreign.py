"""Profile: what is read from a file: costs, and the machine that they are for where the file states one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fxsplit.ir.facts.costs import Costs

TOO_LARGE = 1e60
"""Times and sizes from here on are refused as mistakes. Sums and products of smaller ones do not overflow."""


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
