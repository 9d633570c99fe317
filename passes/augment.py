"""augment: enumerate the ideals of the graph, named by their augmented antichains; learns Antichains.

The first pass of planning: from the costs that `profile` measured to the states that `order` sums and `partition` cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import ChainError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.graph import IR
from fxsplit.planner.lattice.lattice import enumerate_ideals


@dataclass(frozen=True)
class Augment:
    """Enumerate every ideal, up to `max_states` of them.

    Nodes that cost nothing join a neighbour first, where the devices are interchangeable: that needs fewer ideals, and
    loses no plan that `partition` would not find again. `free` states that partition{free=true} follows, which takes
    the devices in any order. In a graph with too many ideals light nodes join what they follow, or the prefixes of one
    topological order take the place of all ideals. The plan then has a gap instead of a proof.
    """

    max_states: int = 1_000_000
    free: bool = False

    name: ClassVar[str] = "augment"
    ignores_mode: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise ChainError(f"augment{{max_states={self.max_states}}}: give a positive number")

    def __call__(self, ir: IR) -> IR:
        """Learn Antichains from Costs."""
        costs, machine, pins = ir[Costs], ir.get(Machine), ir.get(Pins)
        pinned = pins.nodes(costs) if pins else {}
        # Joined nodes may empty a stage, so that later stages move up a device: devices must be interchangeable.
        join = machine is not None and (self.free or (machine.uniform and not pinned))
        return ir.learn(enumerate_ideals(costs, machine, pinned, self.max_states, join=join))
