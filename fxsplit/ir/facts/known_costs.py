"""Known costs: what was measured of operators earlier, and is used again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.facts.measured import Measured
from fxsplit.ir.graph import GivenFact


@dataclass(frozen=True, eq=False)
class KnownCosts(GivenFact):
    """Costs measured earlier, which `profile` uses by operator signature; `complete` forbids it to measure others."""

    costs: Costs
    complete: bool

    made_by: ClassVar[str] = "compile(costs=)"

    @cached_property
    def times(self) -> dict[str, Measured]:
        """The times of each operator, by its signature."""
        return {
            n.signature: Measured(
                n.forward_ms,
                n.backward_ms,
                n.late_ms,
                n.spread_ms,
                n.forward_launch_ms,
                n.backward_launch_ms,
                n.forward_peak_bytes,
                n.backward_peak_bytes,
                n.halved_peak_bytes,
                n.late_peak_bytes,
                n.waiting_bytes,
                n.lent_bytes,
            )
            for n in self.costs.nodes
        }

    def __str__(self) -> str:
        return f"{len(self.times)} operator signatures, {'complete' if self.complete else 'others are measured'}"
