"""What a plan is made for: the schedule with its microbatches, and what the user pins to a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from fxsplit.ir.graph import GivenFact


@dataclass(frozen=True)
class Workload(GivenFact):
    """The schedule by name, the number of microbatches, and how many of them each stage holds at its worst.

    `in_flight[k]` lists, for a pipeline of k stages, the microbatches whose activations each stage keeps at once.
    `versions[k]` lists, where steps of the optimizer come between microbatches, how many versions of its weights each
    of k stages keeps at once; it is one otherwise. `may_idle` allows stages without a node, which then only pass values
    on: where another mode of the model has placed the weights already, this one's graph may be too small for every
    device. `replicated`: the schedule places every stage on several devices, as Chimera does.
    """

    schedule: str
    n_microbatches: int
    in_flight: Mapping[int, tuple[int, ...]]
    may_idle: bool = False
    versions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    replicated: bool = False

    made_by: ClassVar[str] = "compile(schedule=, n_microbatches=)"

    def versions_of(self, n_stages: int) -> tuple[int, ...]:
        """Return how many versions of its weights each of `n_stages` stages keeps at once."""
        return self.versions.get(n_stages, (1,) * n_stages)

    def __str__(self) -> str:
        peaks = "; ".join(f"{k} stages {list(v)}" for k, v in self.in_flight.items())
        kept = "".join(f"; weight versions of {k} stages {list(v)}" for k, v in self.versions.items())
        return f"{self.schedule}, {self.n_microbatches} microbatches, in flight: {peaks}{kept}"
