"""Pins: submodules and nodes that the user has put on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar

from fxsplit.errors import PlanError
from fxsplit.ir.facts.costs import Costs
from fxsplit.ir.graph import IR, GivenFact


@dataclass(frozen=True)
class Pins(GivenFact):
    """The path of a submodule, or the name of a node -> the number of the stage that gets all of it.

    `optional` are paths that the graph may lack: the evaluation mode of a model has no dropout, for example.
    """

    stages: Mapping[str, int]
    optional: frozenset[str] = frozenset()

    made_by: ClassVar[str] = "a pass of yours"

    @staticmethod
    def add(ir: IR, stages: Mapping[str, int]) -> IR:
        """Return `ir` with `stages` pinned besides what is pinned already; raises PlanError for a contradiction."""
        # Several passes may pin, each without knowing of the others.
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
            # The dot keeps "layer1" from matching "layer10".
            found = [n.name for n in costs.nodes if n.name == path or f"{n.module}.".startswith(f"{path}.")]
            if not found and path not in self.optional:
                known = sorted({n.module for n in costs.nodes if n.module})
                # A misspelt path is the usual reason.
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
