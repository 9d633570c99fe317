"""What a file brings: costs, and the machine that it was made for, where it states one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fxsplit.ir.facts.costs import Costs

TOO_LARGE = 1e60
"""No time or size is so large, and sums of smaller ones do not overflow."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Costs read from a file of some `format`.

    `unit` is the file's unit of time, in which objectives are printed. `accelerators`, `hosts`, `memory_bytes` and
    `bytes_per_s` describe the machine that the file states; None means that it states no devices. `cost_model` is the
    one its own tool solves. A stage that takes `never_ms` has nodes that cannot run where they are. Where the file
    states transfers in time, bytes stand for that, at `nominal_bytes_per_ms`.
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
