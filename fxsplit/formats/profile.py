"""What a file brings: costs, and the machine that it was made for, where it states one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fxsplit.costs import Costs


@dataclass(frozen=True, eq=False)
class Profile:
    """Costs read from a file of some `format`.

    `unit` is the file's unit of time, in which objectives are printed. `accelerators`, `hosts`, `memory_bytes` and
    `bytes_per_s` describe the machine that the file states; no accelerators means that it states none. `cost_model` is
    the one its own tool solves.
    """

    costs: Costs
    format: str
    unit: str = "ms"
    accelerators: int = 0
    hosts: int = 0
    memory_bytes: float = inf
    bytes_per_s: float = inf
    cost_model: str = "forwarded"
