"""What a plan is made for: the schedule with its microbatches, and what the user pins to a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import ClassVar

from fxsplit.costs import Costs
from fxsplit.errors import PlanError
from fxsplit.ir import IR


@dataclass(frozen=True)
class Workload:
    """The schedule by name, the number of microbatches, and how many of them each stage holds at its worst.

    `in_flight[k]` lists, for a pipeline of k stages, the microbatches whose activations each stage keeps at once.
    `versions[k]` lists, where steps of the optimizer come between microbatches, how many versions of its weights each
    of k stages keeps at once; it is one otherwise. `may_idle` allows stages without a node, which then only pass values
    on: where another mode of the model has placed the weights already, this one's graph may be too small for every
    device.
    """

    schedule: str
    n_microbatches: int
    in_flight: Mapping[int, tuple[int, ...]]
    may_idle: bool = False
    versions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    made_by: ClassVar[str] = "compile(schedule=, n_microbatches=)"
    given: ClassVar[bool] = True

    def versions_of(self, n_stages: int) -> tuple[int, ...]:
        """Return how many versions of its weights each of `n_stages` stages keeps at once."""
        return self.versions.get(n_stages, (1,) * n_stages)

    def verify(self, ir: IR) -> None:
        """Hold for any graph."""

    def __str__(self) -> str:
        peaks = "; ".join(f"{k} stages {list(v)}" for k, v in self.in_flight.items())
        kept = "".join(f"; weight versions of {k} stages {list(v)}" for k, v in self.versions.items())
        return f"{self.schedule}, {self.n_microbatches} microbatches, in flight: {peaks}{kept}"


@dataclass(frozen=True)
class Pins:
    """Chosen stages: path of a submodule (or name of a node) -> number of the stage that gets it whole.

    `optional` are paths that a graph may lack, as the other mode of a model may.
    """

    stages: Mapping[str, int]
    optional: frozenset[str] = frozenset()

    made_by: ClassVar[str] = "a pass of yours"
    given: ClassVar[bool] = True

    @staticmethod
    def add(ir: IR, stages: Mapping[str, int]) -> IR:
        """Return `ir` with `stages` pinned besides what is pinned already."""
        earlier = ir.get(Pins) or Pins({})
        for path, stage in stages.items():
            if not path:
                raise PlanError(f"a pin on stage {stage} names no submodule: give its path, such as 'layer1'")
            if earlier.stages.get(path, stage) != stage:
                raise PlanError(f"{path!r} is pinned to stage {earlier.stages[path]} and to stage {stage}: keep one")
        return ir.learn(Pins({**earlier.stages, **stages}, earlier.optional - set(stages)))

    def nodes(self, costs: Costs) -> dict[str, int]:
        """Return the stage of every pinned node; raises PlanError for a path that no node belongs to."""
        pinned: dict[str, int] = {}
        for path, stage in self.stages.items():
            found = [n.name for n in costs.nodes if n.name == path or f"{n.module}.".startswith(f"{path}.")]
            if not found and path not in self.optional:
                known = sorted({n.module for n in costs.nodes if n.module})
                close = get_close_matches(path, known, n=3) or known[:3]
                raise PlanError(f"cannot pin {path!r}: no such submodule or node in the graph; did you mean {close}?")
            pinned.update(dict.fromkeys(found, stage))
        return pinned

    def verify(self, ir: IR) -> None:
        """Raise PlanError for a pin of nothing, as soon as the nodes are known."""
        costs = ir.get(Costs)
        if costs is not None:
            self.nodes(costs)

    def __str__(self) -> str:
        return "\n".join(f"{path} on stage {stage}" for path, stage in self.stages.items())
