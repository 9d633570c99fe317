"""augment: enumerate the ideals of the graph, named by their augmented antichains; learns Antichains.

The first pass of planning: `profile` measured the costs, `order` then sums them over the ideals, and `partition` cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxsplit.errors import ChainError
from fxsplit.ir.facts.costs.costs import Costs
from fxsplit.ir.facts.given.machine import Machine
from fxsplit.ir.facts.given.pins import Pins
from fxsplit.ir.facts.lattice.antichains import Antichains
from fxsplit.ir.graph import IR
from fxsplit.planner.lattice.lattice import enumerate_ideals


@dataclass(frozen=True)
class Augment:
    """Enumerate every ideal, at most `max_states`.

    If the devices are interchangeable, nodes without cost first join a neighbour. This needs fewer ideals, and loses no
    plan that `partition` would not recover. `free` announces partition{free=true}, which takes the devices in any
    order. If there would be too many ideals, light nodes join the nodes they follow, or only one topological order is
    enumerated. The plan then has a gap instead of a proof.
    """

    max_states: int = 1_000_000
    free: bool = False

    name: ClassVar[str] = "augment"
    ignores_mode: ClassVar[bool] = True
    needs: ClassVar[tuple[type, ...]] = (Costs,)
    learns: ClassVar[tuple[type, ...]] = (Antichains,)
    ignores_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise ChainError(f"augment{{max_states={self.max_states}}}: give a positive number")

    def __call__(self, ir: IR) -> IR:
        """Learn Antichains from Costs."""
        costs, machine, pins = ir[Costs], ir.get(Machine), ir.get(Pins)
        pinned = pins.nodes(costs, machine) if pins else {}
        # Joining may empty a stage and so move later stages up one device: devices must be interchangeable.
        join = machine is not None and (self.free or (machine.uniform and not pinned))
        found = enumerate_ideals(costs, machine, pinned, self.max_states, join=join)
        sizes = {"states": len(found), "edges": len(found.child), "blocks": len(found.blocks)}
        return ir.learn(found).note(**sizes, nodes=len(costs.nodes), joined=len(found.joined))
